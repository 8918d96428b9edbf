"""Without NVFlare, these tests are skipped."""

import importlib.util
import os
from typing import Any

MISSING = importlib.util.find_spec("nvflare") is None
if MISSING and os.environ.get("CI"):
    raise RuntimeError("CI must run the NVFlare tests: pip install -c constraints.txt -e '.[nvflare]'")
collect_ignore_glob = ["app/*", *(["test_*.py"] if MISSING else [])]  # the app runs in NVFlare's processes


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if MISSING:
        terminalreporter.write_line(
            "tests/nvflare is skipped: NVFlare is not installed (pip install -c constraints.txt -e '.[nvflare]')"
        )
