"""Doctests of the part that needs Flower are left out where it is not installed."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["fedbe/flower/*"]
