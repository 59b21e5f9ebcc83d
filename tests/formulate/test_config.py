"""Hand-written plans: what is read, what is refused, and what the layers then do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ConfigError
from autopar.formulate.config import ManualConfig, layer_ranges, microbatch_count, parse_constraints
from autopar.plan import PlanRecord
from autopar.shard.program import Program, Relayout
from tests.formulate.cases import planner, traced
from tests.formulate.plans import estimate_of, matrix_ways, programs_of, sizes_of, strategies_of, ways


def mistakes_of(text: str) -> tuple[str, ...]:
    """Everything that is wrong with a configuration's text."""
    with pytest.raises(ConfigError) as caught:
        ManualConfig.parse(text)
    return caught.value.mistakes


# --- reading --------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read() -> None:
    """Keys of every kind come back as given, the others have their defaults."""
    config = ManualConfig.parse("dp=4, tp=2,sp=1,zero=3,recompute=full:2,layers=0-1:tp=4+zero=0;3:recompute=full")
    assert (config.dp, config.tp, config.sp, config.zero, config.recompute) == (4, 2, 1, 3, "full:2")
    assert layer_ranges(config.layers) == [(0, 1, {"tp": 4, "zero": 0}), (3, 3, {"recompute": "full"})]
    assert ManualConfig.parse("") == ManualConfig()


def test_every_mistake_is_listed() -> None:
    """Unknown keys and bad values of a text are all named, with the value and what is allowed."""
    found = mistakes_of("dp=0,tpp=2,zero=5,recompute=some,layers=0-1:pp=2,microbatch_size=x")
    assert len(found) == 6
    for part in ("tpp", "dp=0", "zero=5", "recompute=some", "layers=0-1:pp=2", "microbatch_size=x"):
        (mistake,) = [m for m in found if part in m]
        assert "give" in mistake or "allowed" in mistake


def test_every_misfit_is_listed() -> None:
    """What doesn't fit the cluster and the batch is said at once, with the product and the numbers in it."""
    with pytest.raises(ConfigError) as caught:
        ManualConfig(dp=3, tp=2, ep=4, microbatch_size=5).fit(4, 8, 4)
    text = "\n".join(caught.value.mistakes)
    assert len(caught.value.mistakes) == 3
    assert "3*2*1*1 = 6" in text
    assert "ep=4" in text
    assert "global batch 8 can't be cut" in text
    assert "give one of 2, 3" in text  # 3, 3, 2 at once, or twice 2, 1, 1
    with pytest.raises(ConfigError, match="devices=8: the cluster has 4"):
        ManualConfig(devices=8, dp=8).fit(4, 8, 4)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("layers=0-1:tp=0", "tp=0: not allowed"),
        ("layers=0-1:recompute=some", "recompute=some: not allowed"),
        ("layers=3-1:zero=1", "layers=3-1:zero=1: the range ends before it begins; give 1-3"),
        ("recompute=full:0", "recompute=full:0: not allowed"),
    ],
)
def test_values_that_mean_nothing_are_refused(text: str, part: str) -> None:
    """Values inside `layers=` are checked like others, ranges go upwards, and `full:N` recomputes at least a block."""
    (mistake,) = mistakes_of(text)
    assert part in mistake


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("dp=2,schedule=gpipe", "schedule=gpipe: only for pipelines, and pp is 1"),
        ("dp=2,virtual_stages=2", "virtual_stages=2: only for pipelines"),
        ("dp=2,stage_layers=4", "stage_layers=4: only for pipelines"),
        ("dp=2,recompute=full:5", "the model has 4 blocks; give at most full:4"),
        ("dp=2,layers=2-4:zero=1", "layers=2-4: the model has the blocks 0 to 3"),
        ("dp=2,layers=0:tp=4", "layers=0-0:tp=4: must divide the 2 devices"),
    ],
)
def test_keys_without_effect_are_refused(text: str, part: str) -> None:
    """What only pipelines read, blocks that the model lacks, and degrees beyond the devices are said, not ignored."""
    with pytest.raises(ConfigError) as caught:
        estimate_of("gpt", "2xa100-80gb", text)
    (mistake,) = caught.value.mistakes
    assert part in mistake


def test_unsupported_keys_are_refused_together() -> None:
    """Keys that this model, or any, can't be planned with are refused by name, all at once."""
    with pytest.raises(ConfigError) as caught:
        planner("gpt").estimate(ManualConfig.parse("cp=2,ep=2,framework=megatron"))
    assert [m.partition("=")[0] for m in caught.value.mistakes] == ["ep", "framework"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("dp=8,zero=3,zero_group=3", "must divide dp = 8"),
        ("dp=8,zero_group=2", "give zero=1, 2 or 3"),
        ("dp=8,zero=3,zero_group=16", "must divide dp = 8"),
    ],
)
def test_groups_of_zero_that_cannot_be(text: str, part: str) -> None:
    """Sizes that don't divide the replicas, and groups where nothing is sharded, are refused."""
    with pytest.raises(ConfigError, match=part):
        ManualConfig.parse(text).grouped(8)


def test_groups_of_zero_in_ranks() -> None:
    """A node's devices hold tensor parallelism first; a group of all replicas is `all`."""
    texts = ("dp=8,tp=4,zero=1,zero_group=node", "dp=8,zero=1,zero_group=node", "dp=8,zero=1,zero_group=4")
    assert [ManualConfig.parse(text).grouped(8).zero_group for text in texts] == ["2", "all", "4"]


def test_every_bad_constraint_is_listed() -> None:
    """Constraints that are not understood are all named; good ones are read."""
    with pytest.raises(ConfigError) as caught:
        parse_constraints(["zero=7", "exclude=dp", "*.mlp:zero=1", "colour=red", "tp=2"])
    assert len(caught.value.mistakes) == 4
    first, second = parse_constraints(["*.mlp:replicate", "tp=2"])
    assert (first.pattern, first.key, second.key, second.value) == ("*.mlp", "replicate", "tp", "2")
    assert first.covers("blocks.0.mlp.up_proj")
    assert not first.covers("blocks.0.attn")


# --- Megatron -------------------------------------------------------------------------------------------------------


def activation_moves(program: Program, batch: int) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
    """Collectives that move activations, forward and backward: kind and elements of the full local buffer."""
    forward: Counter[tuple[str, int]] = Counter()
    backward: Counter[tuple[str, int]] = Counter()
    for step in program.steps:
        if isinstance(step, Relayout) and program.values[step.source].batch_dim is not None:
            size = program.values[step.source].bytes_at(batch) // 2 // ways(program, step.source, 0)
            forward.update((m.kind, size) for m in step.forward if m.kind != "divide")
            backward.update((m.kind, size) for m in step.backward if m.kind != "divide")
    return forward, backward


@pytest.mark.parametrize("text", ["tp=2", "dp=2,tp=2", "dp=2,tp=2,zero=3,recompute=full", "tp=4,microbatch_size=4"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_tensor_parallelism_is_megatrons(model: str, text: str) -> None:
    """A block all-reduces batch x sequence x width elements twice forward and twice backward, and nothing else."""
    record = estimate_of(model, cluster_for(text), text)
    for program in block_programs(record, model):
        size = record.microbatch_size * 256 * 512
        assert activation_moves(program, record.global_microbatch) == (
            Counter({("all_reduce", size): 2}),
            Counter({("all_reduce", size): 2}),
        )
        assert_column_then_row(program, ManualConfig.parse(text).tp)


@pytest.mark.parametrize("text", ["tp=2,sp=1", "dp=2,tp=2,sp=1,zero=1"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_sequence_parallelism_is_megatrons(model: str, text: str) -> None:
    """With sequence parallelism each all-reduce is an all-gather before and a reduce-scatter behind."""
    record = estimate_of(model, cluster_for(text), text)
    for program in block_programs(record, model):
        size = record.microbatch_size * 256 * 512
        both = Counter({("all_gather", size): 2, ("reduce_scatter", size): 2})
        assert activation_moves(program, record.global_microbatch) == (both, both)
        assert_column_then_row(program, 2)


def assert_column_then_row(program: Program, degree: int) -> None:
    """What leads into attention and feed-forward is split by rows of its weight (its columns), what leads out by the
    other dim, and norms and biases of the way out are whole."""
    for name in program.params:
        outwards = "o_proj" in name or "down_proj" in name
        if len(program.values[name].shape) == 2:
            assert ways(program, name, 1 if outwards else 0) == ways(program, name) == degree
        else:
            assert ways(program, name) == (1 if outwards or "norm" in name else degree)


def cluster_for(text: str) -> str:
    """A node of just the devices a configuration uses; their collectives are priced in closed form, so that no
    switch of algorithm at the small sizes of these models makes another mixture of collectives cheaper."""
    config = ManualConfig.parse(text)
    return f"{config.dp * config.tp}xa800-80gb"


def block_programs(record: PlanRecord, model: str) -> list[Program]:
    """Programs of the transformer blocks."""
    named = zip(traced(model).layers, programs_of(record, model), strict=True)
    return [program for layer, program in named if layer.name.startswith("blocks.")]


# --- other keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_shards_what_it_says(zero: int) -> None:
    """Over two data ranks each level halves one kind of state more, by the closed forms of bf16 with fp32 masters.

    The gathered copies of ZeRO 2 are held from forward to backward: they are activations, if any, at the peak.
    """
    record = estimate_of("gpt", "2xa100-80gb", f"dp=2,zero={zero},microbatch_size=1")
    n, memory = record.num_params, record.memory_by_category
    copies = 2 * n if zero < 2 else 0
    stored = 4 * n if zero == 0 else 2 * n
    assert {s.zero for s in strategies_of(record)} == {zero}
    assert memory["parameters"] == pytest.approx(copies + stored, rel=0.01)
    assert memory["optimizer"] == pytest.approx(8 * n if zero == 0 else 4 * n, rel=0.01)
    assert memory["gradients"] == pytest.approx(4 * n if zero < 2 else 2 * n, rel=0.01)


@pytest.mark.parametrize(("text", "full"), [("none", 0), ("full", 4), ("full:3", 3)])
def test_recomputation_of_the_last_blocks(text: str, full: int) -> None:
    """`full` recomputes all blocks, `full:N` the last N of them, and nothing outside the blocks."""
    record = estimate_of("gpt", "2xa100-80gb", f"dp=2,recompute={text}")
    chosen = [s.recompute == "full" for s in strategies_of(record)]
    assert chosen == [False] + [False] * (4 - full) + [True] * full + [False]


def test_layers_have_their_own_strategies() -> None:
    """`layers=` gives ranges of blocks their own tensor degree, ZeRO level and recomputation; the rest keep theirs."""
    text = "dp=2,tp=2,zero=1,microbatch_size=2,layers=0:tp=4+zero=0;2-3:tp=1+zero=3+recompute=full"
    record = estimate_of("gpt", "4xa100-80gb", text)
    blocks, programs = strategies_of(record)[1:-1], block_programs(record, "gpt")
    assert [matrix_ways(p) for p in programs] == [{4}, {2}, {1}, {1}]
    assert [ways_in(s.entry, sizes_of(record)) for s in blocks] == [1, 2, 4, 4]
    assert [s.zero for s in blocks] == [0, 1, 3, 3]
    assert [s.recompute for s in blocks] == ["none", "none", "full", "full"]


def ways_in(entry: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Into how many parts the batch is split in front of a layer."""
    found = 1
    for placement, size in zip(entry, sizes, strict=True):
        found *= size if placement == 0 else 1
    return found


def test_layers_that_split_the_batch_too_far_are_refused() -> None:
    """A block that needs more batch ways than a microbatch has samples is refused with a size that does."""
    with pytest.raises(ConfigError, match="give microbatch_size=2 or more"):
        estimate_of("gpt", "4xa100-80gb", "dp=2,tp=2,layers=0:tp=1")
    assert estimate_of("gpt", "4xa100-80gb", "dp=2,tp=2,microbatch_size=2,layers=0:tp=1").step_time_s > 0


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 12))
def test_microbatches_are_equal_and_the_largest_replica_has_its_size(batch: int, ways: int, size: int) -> None:
    """The first number that divides the batch, has a row for each replica and the wanted size for the largest."""
    fits = [n for n in range(1, batch + 1) if batch % n == 0 and batch // n >= ways]
    fits = [n for n in fits if max(len(range(i, batch // n, ways)) for i in range(ways)) == size]
    assert microbatch_count(batch, ways, size) == (min(fits) if fits else None)
    if batch % (ways * size) == 0:
        assert microbatch_count(batch, ways, size) == batch // (ways * size)


@pytest.mark.parametrize(
    ("cluster", "text"),
    [("2xa100-80gb", "tp=2,sp=1,microbatch_size=4"), ("4xa100-80gb", "pp=2,tp=2,sp=1,microbatch_size=2")],
)
def test_a_sequence_of_one_position_cannot_be_split(cluster: str, text: str) -> None:
    """A plan that leaves a layer nowhere to put its values is refused by name, in one stage and in pipelines."""
    with pytest.raises(ConfigError, match="can't be laid out on this model"):
        estimate_of("one-token", cluster, text)
