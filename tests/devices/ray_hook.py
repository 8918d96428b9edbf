"""For worker processes of Ray: the emulated accelerator. A worker sees the devices that Ray reserved for it."""

import importlib
import os

from fedbe.core import layout


def enter():
    """Called by Ray when a worker process starts; this folder is in its PYTHONPATH."""
    emulated = importlib.import_module("emulated")
    emulated.register()
    layout.PLAIN_TENSORS = (*layout.PLAIN_TENSORS, emulated.EmulatedTensor)
    emulated._Module.device_count = lambda _: len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    emulated.EmulatedMode().__enter__()
