"""How models are trained: the small models of `compare`, and the swapped models of `adapt`.

adapting.py swaps an encoding and trains the model on, after a recipe of recipes.py, with
transformers' Trainer (trainer.py). folder.py keeps what is done. This module imports nothing, so
that the command line needs no torch for its help.
"""
