"""Readers of official file formats."""
