"""What is told apart from noise, and what a change of plans is worth: closed forms."""

from __future__ import annotations

import random

import pytest

from autopar.elastic.watch import Watch, gain_s, most_gained_s, speeds


def alarms(watch: Watch, steps_s: list[float]) -> list[int]:
    """The steps at which the watch says that something has changed for good; it settles on each."""
    found = []
    for number, step_s in enumerate(steps_s):
        if watch.see(step_s):
            found.append(number)
            watch.settle()
    return found


@pytest.mark.parametrize("noise", [0.05, 0.15])
@pytest.mark.parametrize("predicted_s", [1.0, 1.1])
def test_noise_is_none(noise: float, predicted_s: float) -> None:
    """200 steps that differ by 5 % (or 15 %) either way say nothing, with single ones of ten times as long."""
    drawn = random.Random(0)
    steps_s = [drawn.uniform(1 - noise, 1 + noise) * (10 if n % 50 == 49 else 1) for n in range(200)]
    assert alarms(Watch(predicted_s), steps_s) == []


@pytest.mark.parametrize("patience", [1, 5, 20])
@pytest.mark.parametrize("factor", [3.0, 1.5, 0.5])
def test_a_lasting_change(patience: int, factor: float) -> None:
    """Steps that take another time from step 30 on are told after `patience` of them, once, with what they take now."""
    drawn = random.Random(1)
    steps_s = [drawn.uniform(0.95, 1.05) * (factor if n >= 30 else 1.0) for n in range(200)]
    watch = Watch(1.0, patience)
    assert alarms(watch, steps_s) == [29 + patience]
    assert watch.now_s == pytest.approx(factor, rel=0.05)


def test_wide_noise_is_not_slowness() -> None:
    """Steps of 0.5 to 2 s tell nothing of one of 3 s; steady ones of 1 s do."""
    drawn = random.Random(2)
    restless, steady = Watch(1.0, 1, tolerance=1.5), Watch(1.0, 1, tolerance=1.5)
    for _ in range(40):
        restless.see(drawn.uniform(0.5, 2.0))
        steady.see(1.0)
    assert not restless.see(3.0)
    assert steady.see(3.0)


def test_a_wrong_prediction_is_told_once() -> None:
    """Steps of four times the prediction are usual from then on; a slow rank on top of that is told again."""
    steps_s = [4.0] * 20 + [12.0] * 20
    assert alarms(Watch(1.0, 5), steps_s) == [4, 24]


def test_off_either_way_in_turn_is_not_lasting() -> None:
    """Only steps that are off on the same side count together."""
    assert alarms(Watch(1.0, 2), [3.0, 0.3] * 20) == []


def test_pace_of_each() -> None:
    """Who needs three times as long goes at a third of the pace of its kind; 20 % are none, other kinds are apart."""
    assert speeds([1.0, 1.1, 3.0, 1.2], "aaaa") == (1.0, 1.0, 0.37, 1.0)
    assert speeds([1.0, 1.0, 3.0, 3.1], "aabb") == (1.0, 1.0, 1.0, 1.0)
    assert speeds([1.0, 2.0], "aa") == (1.0, 0.5)


def test_what_a_change_is_worth() -> None:
    """At 3 s a step a plan predicted at half the seconds saves 1.5 s each; no plan saves more than pace allows."""
    assert gain_s(3.0, 0.2, 0.1, 10) == pytest.approx(15.0)
    assert most_gained_s(3.0, [1.0, 1.0], 10) == 0.0
    # Work for 3 s at a pace of 1/3 is 1 s at full pace on each of 4 devices; at 3 1/3 devices' pace, 1.2 s.
    assert most_gained_s(3.0, [1.0, 1.0, 1 / 3, 1.0], 10) == pytest.approx(10 * (3.0 - 1.2))
