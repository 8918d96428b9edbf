"""Federated learning by Bayesian model ensemble (FedBE, ICLR 2021) and its baselines.

The public names, and nothing else. They are loaded on first use, so that `import fedbe` costs milliseconds
and not the seconds that torch takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
