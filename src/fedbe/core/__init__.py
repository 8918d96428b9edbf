"""Tensors, models, randomness and files: what every other part is built on."""
