"""Numbers from finished runs: reading them, re-running a round, and what the paper's figures measure."""
