"""The documentation. `docs.writers` writes the tables of its pages."""
