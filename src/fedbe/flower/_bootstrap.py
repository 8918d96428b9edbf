"""Runs before Flower is imported: checks that Flower is installed and turns its telemetry off."""

import importlib.util
import os

from fedbe.errors import missing_extra

# Flower and Ray send usage data and check for updates unless these are set before the import.
NO_TELEMETRY = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
for _name, _value in NO_TELEMETRY.items():
    os.environ.setdefault(_name, _value)

if importlib.util.find_spec("flwr") is None:
    raise missing_extra("fedbe.flower needs Flower", "flower")
