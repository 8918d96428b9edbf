"""A federation that learns handwritten digits."""
