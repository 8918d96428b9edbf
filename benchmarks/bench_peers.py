"""Two jobs with fedbe and with other simulators. `python -m benchmarks.peers` has options."""

from benchmarks.peers.__main__ import main as run


def main() -> None:
    """Run with the default options."""
    run([])
