"""The licences of all packages that fedbe needs, directly or through others. docs/licences.md is the committed list.

    python -m benchmarks.licences           # compare the list with what is installed; `make check` does it
    python -m benchmarks.licences --write   # write the list again

Packages that are not installed here (another system, another Python) are not compared.
"""

import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs" / "licences.md"
EXTRAS = ("flower", "nvflare", "tensorboard", "parquet", "wandb", "mlflow")
HEAD = """# Licences

fedbe has the Apache License 2.0. It needs these packages, directly or through others. The packages of an extra are
needed only with it (`pip install -c constraints.txt -e '.[flower]'`). `make check` compares this list with the
installed packages, and refuses copyleft licences that would reach fedbe. Written by
`python -m benchmarks.licences --write`.

| package | licence | needed by |
|---|---|---|
"""


def needed(extras: Sequence[str] = EXTRAS) -> dict[str, str]:
    """Every installed package that fedbe needs -> the extra that needs it first; empty if fedbe always does."""
    found: dict[str, str] = {}
    for extra in ("", *extras):
        waiting, seen = [("fedbe", extra)], set[tuple[str, str]]()
        while waiting:
            wanted = waiting.pop()
            if wanted not in seen:
                seen.add(wanted)
                for name, inner in _requirements(*wanted):
                    found.setdefault(name, extra)
                    waiting += [(name, more) for more in ("", *inner)]
    return {name: extra for name, extra in sorted(found.items()) if licence(name)}


def _requirements(package: str, extra: str) -> Iterator[tuple[str, set[str]]]:
    try:
        lines = _ours(extra) if package == "fedbe" else requires(package) or []
    except PackageNotFoundError:
        return
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield canonicalize_name(requirement.name), requirement.extras


def _ours(extra: str) -> list[str]:
    """What pyproject.toml says, which an editable installation may not know yet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines: list[str] = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return lines


def licence(package: str) -> str:
    """The licence in a package's metadata; empty if the package is not installed."""
    try:
        fields = metadata(package)
    except PackageNotFoundError:
        return ""
    if "License-Expression" in fields:
        return fields["License-Expression"]
    classifiers = [c.rpartition(" :: ")[2] for c in fields.get_all("Classifier") or () if c.startswith("License ::")]
    text = ", ".join(classifiers) or (fields.get_all("License") or [""])[0].strip().partition("\n")[0]
    return text[:80].replace("|", "/") or "not stated"


def problems(listed: dict[str, str]) -> list[str]:
    """Sentences about packages whose licence is not the listed one, or not one for us."""
    sentences = []
    for name in needed():
        found = licence(name)
        if listed.get(name) != found:
            sentences.append(f"{name} has the licence '{found}', the list has '{listed.get(name, 'nothing')}'")
        if "GPL" in found.replace("LGPL", "") and "Lesser" not in found and " OR " not in found:
            sentences.append(f"{name} has the licence '{found}', which would reach fedbe")
    return sentences


def read_list() -> dict[str, str]:
    """package -> licence, from docs/licences.md."""
    rows = [line.strip("| \n").split(" | ") for line in LIST.read_text(encoding="utf-8").splitlines() if " | " in line]
    return {row[0]: row[1] for row in rows[1:]}


def main(write: bool) -> int:
    """Write or compare the list; 1 if it is not right."""
    if write:
        rows = [f"| {name} | {licence(name)} | {extra or 'fedbe'} |" for name, extra in needed().items()]
        LIST.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    wrong = problems(read_list())
    print("\n".join(wrong) or f"licences: {len(needed())} packages, all as listed")
    if wrong:
        print("look at them, then: python -m benchmarks.licences --write")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv))
