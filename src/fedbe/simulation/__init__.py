"""A federation on one machine: rounds, worker processes, checkpoints."""
