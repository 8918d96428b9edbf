"""The local step size over rounds."""

from fedbe.errors import SettingError, nearest

SCHEDULES = ("paper", "released", "constant")


def step_size(base: float, round: int, rounds: int, schedule: str = "paper") -> float:
    """η_l of round r = 1 … R.

    paper     base until 30 % of the rounds are played, then base/10, and base/100 once 60 % are
    released  base/2 in round 1; then base, ×0.2 after 30 %, ×0.1 after 60 %, ×0.01 after 90 % of the rounds
    constant  base

    The paper writes "0.01 if r < 0.3 R"; here its r counts the rounds played before, so that 30 % of the rounds have
    the base step size, and a single round (R = 1) has it too.

    >>> [step_size(0.01, r, 10) for r in (3, 4, 7)]
    [0.01, 0.001, 0.0001]
    """
    if not 1 <= round <= rounds:
        raise SettingError(f"`round` must be from 1 to {rounds}, got {round}")
    # Whole numbers: 0.3 · R in floating point can fall on the wrong side of a round.
    part, whole = 10 * (round - 1), rounds
    if schedule == "constant":
        factor = 1.0
    elif schedule == "paper":
        factor = 1.0 if part < 3 * whole else 0.1 if part < 6 * whole else 0.01
    elif schedule == "released":
        factor = 1.0 if part < 3 * whole else 0.2 if part < 6 * whole else 0.1 if part < 9 * whole else 0.01
        factor = 0.5 if round == 1 else factor
    else:
        raise SettingError(f"unknown schedule '{schedule}': {nearest(schedule, SCHEDULES)}")
    return base * factor
