"""Precision, threads and cores."""

import os
from pathlib import Path

import pytest
from torch import nn

from fedbe import Plan, SettingError
from fedbe.core import compute
from fedbe.core.compute import cores, has_bfloat16, resolve_precision, server_threads


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no processor affinity")
def test_cores_follow_the_affinity_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "CPU_QUOTA", tmp_path / "none")
    allowed = os.sched_getaffinity(0)
    assert cores() == len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("quota", "expected"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 4), ("", 4), (None, 4)]
)
def test_the_quota_of_a_container_limits_cores(
    quota: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(compute, "CPU_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert cores() == expected


FLAGS = {
    "x86 with bfloat16": "processor : 0\nflags : fpu avx512_bf16 amx_tile\n",
    "ARM with bfloat16": "Features : fp asimd bf16\n",
    "without": "flags : fpu avx2\nbugs : bf16\n",
    "empty": "",
}


@pytest.mark.parametrize(
    ("cpu", "precision"),
    [
        ("x86 with bfloat16", "bfloat16"),
        ("ARM with bfloat16", "bfloat16"),
        ("without", "float32"),
        ("empty", "float32"),
        (None, "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_processor_has_it(
    cpu: str | None, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "CPU_FLAGS", tmp_path / "cpuinfo")
    if cpu is not None:
        (tmp_path / "cpuinfo").write_text(FLAGS[cpu])
    assert has_bfloat16() == (precision == "bfloat16")
    assert resolve_precision("auto") == precision
    assert resolve_precision("float32") == "float32"
    assert resolve_precision("bfloat16") == "bfloat16"


def test_an_unknown_precision_gets_a_hint() -> None:
    with pytest.raises(SettingError, match="did you mean 'float32'"):
        resolve_precision("float23")


def test_only_convolutions_use_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "cores", lambda: 8)
    assert server_threads(nn.Sequential(nn.Conv2d(3, 4, 3))) == 8
    assert server_threads(nn.Linear(3, 4)) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"precision": "bfloat"}, "did you mean 'bfloat16'"), ({"batch_size": 0}, "`batch_size` must be >= 1")],
)
def test_plans(settings, message):
    with pytest.raises(SettingError, match=message):
        Plan(**settings)
