"""Break runs, disks, processes, files and replies on purpose, and count. `make chaos`."""
