"""Doctests of the part that needs Flower are left out where it is not installed."""

import importlib.util

ENGINES = {"flwr": "fedbe/flower/*", "nvflare": "fedbe/nvflare/*"}
collect_ignore_glob = [path for name, path in ENGINES.items() if importlib.util.find_spec(name) is None]
