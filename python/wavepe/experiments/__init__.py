"""Experiments on small and on trained models: what ``wavepe compare`` and ``wavepe adapt`` do."""
