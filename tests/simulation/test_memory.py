"""The peak of a phase is that of the phase, not of what came before."""

import sys

import pytest
import torch

from fedbe.simulation.memory import Peak


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a mark that can be reset")
def test_a_peak_belongs_to_its_phase() -> None:
    first = Peak([])
    big = torch.ones(100 * 2**20 // 4)  # 100 MB, touched
    before = first.mb()
    del big
    second = Peak([])
    assert before - second.mb() > 80
