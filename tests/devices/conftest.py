"""Every test in this folder has an emulated accelerator."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedbe.core import layout


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("emulated", Path(__file__).with_name("emulated.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["emulated"] = module
    spec.loader.exec_module(module)
    return module


# While pytest collects, so before any test: torch starts a thread for each device at the first backward pass.
emulated = _load()
emulated.register()


@pytest.fixture(autouse=True)
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The emulated devices emu:0 and emu:1."""
    monkeypatch.setattr(layout, "PLAIN_TENSORS", (*layout.PLAIN_TENSORS, emulated.EmulatedTensor))
    emulated.EMULATOR.memory_ends_in = None
    emulated.EMULATOR.full = emulated.Emulator().full
    emulated.EMULATOR.used.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # they change the last bits, and torch's thread for a device's backward passes keeps its own
    with emulated.EmulatedMode():
        yield emulated.EMULATOR
    torch.set_num_threads(threads)
