"""The table of pipelines that can be run."""

from __future__ import annotations

import pytest

from autopar.cells import CELLS, refusal

NONE = frozenset({"none"})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"])
def test_pipelines_mix_zero_and_recomputation(schedule: str) -> None:
    """Every ZeRO level and every kind of recomputation may meet in one plan."""
    stages = 4 if schedule in ("gpipe", "1f1b", "zb") else 8
    assert not refusal(schedule, {0, 1, 2, 3}, {"none", "light", "selective", "full"}, stages, 8, 4)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "groups", "words"),
    [
        ("dance", 2, 4, 2, "not known"),
        ("accumulate", 2, 4, 2, "one stage, not 2"),
        ("none", 1, 4, 1, "accumulate does"),
        ("gpipe", 1, 4, 1, "at least 2 groups"),
        ("1f1b", 4, 4, 2, "interleaved"),
        ("1f1b", 4, 3, 4, "gpipe"),
        ("interleaved", 2, 4, 2, "there are 2"),
        ("interleaved", 4, 5, 2, "a multiple of 2 can"),
        ("zb", 2, 5, 2, "a multiple of 2 can"),
        ("zb", 3, 4, 2, "there are 3"),
        ("zbv", 2, 4, 2, "needs 2 stages for each of 2 groups, not 2"),
        ("dualpipev", 4, 3, 2, "zbv takes fewer"),
    ],
)
def test_refusals_say_what_would_do(schedule: str, stages: int, microbatches: int, groups: int, words: str) -> None:
    """The message holds what is wrong and the remedy."""
    assert words in refusal(schedule, {0}, NONE, stages, microbatches, groups)


def test_levels_outside_the_table() -> None:
    """ZeRO levels and kinds of recomputation that no cell has are refused, whatever the schedule."""
    for schedule in CELLS:
        assert "ZeRO [4]" in refusal(schedule, {0, 4}, NONE, 1)
        assert "some" in refusal(schedule, {0}, {"some"}, 1)
