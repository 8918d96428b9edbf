"""Which device a name means, and sentences for those that are not there."""

from contextlib import contextmanager

import pytest
import torch

from fedbe import Plan, SettingError
from fedbe.core.compute import resolve_precision
from fedbe.core.devices import (
    default_workers,
    describe_device,
    device_of_worker,
    has_bfloat16_units,
    list_devices,
    parse_devices,
    resolve_device,
)


@pytest.fixture
def machine(monkeypatch):
    """machine(cuda=2): torch sees two CUDA devices."""

    current = [0]

    @contextmanager
    def device(chosen):
        current.append(torch.device(chosen).index or 0)
        yield
        current.pop()

    def see(cuda=0, mps=0, bfloat16=True, without_bfloat16=None):
        for kind, count in (("cuda", cuda), ("mps", mps), ("xpu", 0)):
            module = getattr(torch, kind)
            monkeypatch.setattr(module, "is_available", lambda count=count: count > 0, raising=False)
            monkeypatch.setattr(module, "device_count", lambda count=count: count)
        supported = lambda including_emulation: bfloat16 and current[-1] != without_bfloat16  # noqa: ARG005, E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of type {device.index % 2}")

    return see


@pytest.mark.parametrize(
    ("seen", "text", "expected"),
    [
        ({}, "auto", "cpu"),
        ({"cuda": 2}, "auto", "cuda:0"),
        ({"mps": 1}, "auto", "mps"),
        ({"cuda": 1, "mps": 1}, "auto", "cuda:0"),
        ({"cuda": 2}, "cuda", "cuda:0"),
        ({"cuda": 2}, "cuda:1", "cuda:1"),
        ({"cuda": 2}, "cuda:1,0", "cuda:1,0"),
        ({"cuda": 2}, "cpu", "cpu"),
        ({"mps": 1}, "mps", "mps"),
    ],
)
def test_names(machine, seen, text, expected):
    machine(**seen)
    assert resolve_device(text) == expected
    assert Plan(device=text).device == expected


@pytest.mark.parametrize(
    ("seen", "text", "message"),
    [
        ({}, "cuda", "sees no cuda device .*: use cpu"),
        ({}, "mps", "sees no mps device"),
        ({"cuda": 2}, "cuda:2", "no cuda:2 .*sees cuda:0, cuda:1"),
        ({"cuda": 2}, "cuda:0,5", "there is no cuda:5"),
        ({"cuda": 2}, "cuda:0,0", "lists a number twice"),
        ({}, "gpu", "unknown device 'gpu': use auto, cpu, cuda"),
        ({}, "cuda:", "unknown device"),
        ({}, "cuda:x", "unknown device"),
        ({}, "cpu:0", "unknown device"),
        ({}, "meta", "sees no meta device"),
        ({}, "", "unknown device ''"),
        ({}, 0, "`device` must be a text"),
    ],
)
def test_sentences(machine, seen, text, message):
    machine(**seen)
    with pytest.raises(SettingError, match=message):
        resolve_device(text)
    with pytest.raises(SettingError, match=message):
        Plan(device=text)


def test_lists_and_descriptions(machine):
    machine(cuda=3)
    assert list_devices("cuda") == ["cuda:0", "cuda:1", "cuda:2"]
    assert list_devices("cpu") == ["cpu"]
    assert describe_device("cuda:0,2") == "cuda:0,2 (GPU of type 0)"
    assert describe_device("cuda:0,1") == "cuda:0,1 (GPU of type 0, GPU of type 1)"
    assert describe_device("cpu") == "cpu"
    assert parse_devices("cuda:0,2") == (torch.device("cuda:0"), torch.device("cuda:2"))


def test_auto_precision_is_that_of_the_device(machine):
    machine(cuda=1)
    assert resolve_precision("auto", "cuda:0") == "bfloat16"
    assert resolve_precision("float32", "cuda:0") == "float32"
    machine(cuda=1, bfloat16=False)
    assert resolve_precision("auto", "cuda:0") == "float32"
    assert not has_bfloat16_units("mps")
    machine(cuda=2, without_bfloat16=1)
    assert [has_bfloat16_units(text) for text in ("cuda:0", "cuda:1", "cuda:0,1")] == [True, False, False]


def test_an_accelerator_gets_a_few_workers():
    assert default_workers("cpu", 64) == 64
    assert default_workers("cuda:0", 64) == 4
    assert default_workers("cuda:0,1", 64) == 8
    assert default_workers("cuda:0", 2) == 2


def test_a_worker_takes_a_device_that_it_sees(machine):
    machine(cuda=2)
    assert [device_of_worker("cuda:0,1", i) for i in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [device_of_worker(text, 3) for text in ("cuda", "cuda:1", "cpu")] == ["cuda:0", "cuda:1", "cpu"]
    machine(cuda=1)  # Ray reserved one
    assert [device_of_worker(text, 1) for text in ("cuda:0,1", "cuda:1")] == ["cuda:0", "cuda:0"]
    machine()
    with pytest.raises(SettingError, match="sees no cuda device"):
        device_of_worker("cuda:0,1", 0)


def test_a_device_that_only_workers_have(machine):
    machine()
    assert describe_device("cuda") == "cuda (of the workers; the server step on cpu)"
    assert resolve_precision("auto", "cuda") == "float32"


def test_workers_take_devices_in_turn(machine):
    machine(cuda=2)
    assert [Plan(device="cuda:0,1").for_worker(i).device for i in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert Plan().for_worker(1) == Plan()
