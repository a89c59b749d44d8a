"""How models are trained: the small models of `compare`, and the swapped models of `adapt`.

This module imports nothing, so that the command line needs no torch for its help.
"""
