"""The paper's tables and figures as grids of runs, with the paper's numbers next to ours."""
