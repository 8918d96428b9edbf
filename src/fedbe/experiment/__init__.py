"""Simulated federations: recipe, rounds, run folders, checkpoints, comparison."""
