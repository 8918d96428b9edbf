"""The local step size over rounds."""

from collections.abc import Mapping

from fedbe.errors import SettingError, nearest

# (tenths of the rounds, factor): the factor of the last row that has been reached.
FACTORS: Mapping[str, tuple[tuple[int, float], ...]] = {
    "paper": ((0, 1.0), (3, 0.1), (6, 0.01)),
    "released": ((0, 1.0), (3, 0.2), (6, 0.1), (9, 0.01)),
    "constant": ((0, 1.0),),
}
SCHEDULES = tuple(FACTORS)


def step_size(base: float, round: int, rounds: int, schedule: str = "paper") -> float:
    """η_l of round r = 1 … R.

    Args:
        base: the step size before any factor.
        round, rounds: r and R.
        schedule: paper (base, ×0.1 after 30 % of the rounds, ×0.01 after 60 %); released (base/2 in round 1, then base,
            ×0.2, ×0.1 and ×0.01, each one round later than after 30, 60 and 90 %); or constant.

    The paper writes "0.01 if r < 0.3 R". Here r counts the rounds before this one: 30 % of the rounds have the base
    step size, and a single round (R = 1) has it, too. The released program counts in the same way and writes r > 0.3 R:
    of 40 rounds, the step size falls in rounds 14, 26 and 38.

    Raises:
        SettingError: for an unknown schedule, or a round that is not from 1 to R.

    Example:
        >>> [step_size(0.01, r, 10) for r in (3, 4, 7)]
        [0.01, 0.001, 0.0001]
    """
    if not 1 <= round <= rounds:
        raise SettingError(f"`round` must be from 1 to {rounds}, got {round}")
    if schedule not in FACTORS:
        raise SettingError(f"unknown schedule '{schedule}': {nearest(schedule, SCHEDULES)}")
    if schedule == "released" and round == 1:
        return base * 0.5
    # Whole numbers: 0.3 · R in floating point can fall on the wrong side of a round.
    passed = 10 * (round - 1) - (schedule == "released")
    return base * [factor for tenths, factor in FACTORS[schedule] if passed >= tenths * rounds][-1]
