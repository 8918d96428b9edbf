"""The short form of `make chaos`: nothing is lost, nothing differs, no error is raw."""

import pytest
from benchmarks import chaos


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_lost(capsys):
    arguments = ["--kills", "6", "--writes", "16", "--inputs", "700", "--replies", "100", "--seed", "1"]
    assert chaos.main(arguments) == 0, capsys.readouterr().out
