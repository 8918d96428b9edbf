"""Before Flower is imported: is it there, and is it quiet?"""

import importlib.util
import os

from fedbe.errors import ExtraError

# Flower and Ray report usage and look for updates over the network unless told otherwise before they are imported.
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)

if importlib.util.find_spec("flwr") is None:
    raise ExtraError("fedbe.flower needs Flower: pip install 'fedbe[flower]'")
