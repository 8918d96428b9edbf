"""python -m benchmarks [name …]: run the named benchmarks (`core`, `loader`, `round`), or all that take minutes."""

import sys
from importlib import import_module
from pathlib import Path

from rich.console import Console

LONG = {"peers", "server", "sizes"}  # ten minutes a turn and more; peers need environments of their own


def main(names: list[str]) -> int:
    """Run benchmarks by name. Returns the exit code."""
    console = Console()
    known = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    unknown = [name for name in names if name not in known]
    if unknown:
        console.print(f"no benchmark '{unknown[0]}': choose from {', '.join(known)}")
        return 2
    for name in names or [name for name in known if name not in LONG]:
        console.rule(name)
        import_module(f"benchmarks.bench_{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
