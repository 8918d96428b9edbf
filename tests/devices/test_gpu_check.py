"""`make gpu-check` on the emulated device, and where there is nothing to check."""

import pytest
import torch
from benchmarks import gpu_check


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(gpu_check, "NETWORKS", ("mlp",))
    monkeypatch.setattr(gpu_check, "METHODS", ("scaffold",))


@pytest.mark.slow
def test_parity_and_runs_pass_on_a_correct_device():
    findings = [*gpu_check.parity("emu:0"), *gpu_check.whole_runs("emu:0", 0)]
    assert len(findings) == 5
    assert all(finding.good for finding in findings), findings


def test_a_wrong_device_is_found(monkeypatch):
    exact = torch._fused_sgd_

    def wrong(parameters, *arguments, lr, **settings):
        factor = 1.01 if parameters[0].device.type == "emu" else 1.0
        return exact(parameters, *arguments, lr=lr * factor, **settings)

    monkeypatch.setattr(torch, "_fused_sgd_", wrong)
    assert not next(gpu_check.parity("emu:0")).good


def test_without_an_accelerator_it_says_so(capsys):
    assert gpu_check.main([]) == 0
    assert "nothing to check" in capsys.readouterr().out
