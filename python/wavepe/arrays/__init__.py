"""The functions for NumPy arrays, one module each; `import wavepe` has their public names."""
