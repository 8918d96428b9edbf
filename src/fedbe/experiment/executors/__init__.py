"""Where jobs run: a pool of worker processes, or this process."""
