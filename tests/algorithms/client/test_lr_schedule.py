import pytest

from fedbe.algorithms.client import step_size
from fedbe.errors import SettingError


@pytest.mark.parametrize(
    ("round", "expected"),
    # 0.3·40 = 12 rounds at 0.01, rounds 13 to 24 at 0.001, then 0.0001
    [(1, 0.01), (12, 0.01), (13, 0.001), (24, 0.001), (25, 0.0001), (40, 0.0001)],
)
def test_paper(round, expected):
    assert step_size(0.01, round, 40) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("round", "expected"),
    # iter = r − 1 from 0: half in iter 0; ×0.2 where iter > 12, ×0.1 where iter > 24, ×0.01 where iter > 36
    [(1, 0.005), (2, 0.01), (13, 0.01), (14, 0.002), (25, 0.002), (26, 0.001), (37, 0.001), (38, 0.0001)],
)
def test_released(round, expected):
    assert step_size(0.01, round, 40, "released") == pytest.approx(expected, rel=1e-12)


def test_borders_are_not_at_the_mercy_of_rounding():
    # 0.3·10 is 3.0000000000000000 or less in floating point; the border belongs to the smaller step.
    for rounds in range(10, 200, 10):
        assert step_size(1.0, 3 * rounds // 10 + 1, rounds) == 0.1
        assert step_size(1.0, 6 * rounds // 10 + 1, rounds) == 0.01


def test_a_single_round_has_the_base_step_size():
    assert step_size(0.01, 1, 1) == 0.01
    assert step_size(0.01, 1, 1, "released") == 0.005


def test_constant():
    assert {step_size(0.5, r, 40, "constant") for r in range(1, 41)} == {0.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.1, 0, 10), "`round` .* to 10, got 0"),
        ((0.1, 11, 10), "`round` .* to 10, got 11"),
        ((0.1, 1, 10, "papr"), "unknown schedule 'papr': did you mean 'paper'"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(SettingError, match=message):
        step_size(*arguments)
