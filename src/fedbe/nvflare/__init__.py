"""FedBE in NVIDIA FLARE (nvflare ≥ 2.9): a controller for every method, and a helper for clients.

    job.to_server(fedbe.nvflare.MethodController(method="fedbe", model="net:Net", unlabeled="net:server_images"))

The rest of the package never imports NVFlare. This part needs the extra `nvflare`.
"""

import importlib.util

from fedbe.errors import missing_extra

if importlib.util.find_spec("nvflare") is None:
    raise missing_extra("fedbe.nvflare needs NVIDIA FLARE", "nvflare")

from fedbe.nvflare.client import fit
from fedbe.nvflare.controller import MethodController

__all__ = ["MethodController", "fit"]
