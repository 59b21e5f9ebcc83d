from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ProfileError
from autopar.graph import CollectiveKey, DeviceArg, Dtype, Operand, OpKey
from autopar.measure.keys import Key, decode_key, encode_key
from autopar.measure.profile import Environment, Profile, Sample, Timing
from autopar.measure.store import Store, cache_directory

HERE = Environment("some processor", "cpu", "2.13.0", 1, 2)
PRODUCT = OpKey("aten.mm.default", (Operand((4, 5), "float32", True), Operand((5, 6), "float32", False)))
SUM = CollectiveKey("all_reduce", 4096, 2, 1)
TIMINGS: dict[Key, Timing] = {
    PRODUCT: Timing(Sample((1e-6, 2e-6, 4e-6)), Sample((3e-6,))),
    SUM: Timing(Sample((5e-5,))),
    OpKey("aten.odd.default", ()): Timing(failed="RuntimeError: no such op"),
}

operands = st.builds(
    Operand,
    st.lists(st.integers(0, 1 << 20), max_size=4).map(tuple),
    st.sampled_from(["float32", "bfloat16", "int64"]),
    st.booleans(),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
arguments = st.recursive(
    scalars | operands | st.builds(Dtype, st.just("float16")) | st.just(DeviceArg()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
op_keys = st.builds(
    OpKey,
    st.just("aten.any.default"),
    st.lists(arguments, max_size=4).map(tuple),
    st.dictionaries(st.text("abc", min_size=1), arguments, max_size=2).map(lambda d: tuple(sorted(d.items()))),
)


@given(op_keys)
def test_keys_survive_text(key: OpKey) -> None:
    """Every key is the same after a round trip through its canonical text."""
    assert decode_key(encode_key(key)) == key


def test_what_is_no_key_is_refused() -> None:
    """The error shows the text."""
    with pytest.raises(ProfileError, match="nonsense"):
        decode_key("nonsense")


def test_median_and_quartiles() -> None:
    """Of 1, 2, 3, 4, 10: median 3, quartiles 2 and 4."""
    sample = Sample((1.0, 2.0, 3.0, 4.0, 10.0))
    assert (sample.median_s, sample.iqr_s) == (3.0, 2.0)


def test_timings_survive_the_store(tmp_path: Path) -> None:
    """What was added is found again by a new store on the same file, environments apart."""
    Store(tmp_path / "s").add(HERE, TIMINGS)
    again = Store(tmp_path / "s")
    assert again.get(HERE, [*TIMINGS, CollectiveKey("all_gather", 1, 2)]) == TIMINGS
    assert again.get(replace(HERE, threads=2), list(TIMINGS)) == {}
    assert again.environments() == (HERE,)


def test_timings_survive_a_file(tmp_path: Path) -> None:
    """A profile is the same after saving and loading."""
    Profile(HERE, TIMINGS).save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert (loaded.environment, dict(loaded.timings)) == (HERE, TIMINGS)


def test_unlike_environments_do_not_mix() -> None:
    """Merging profiles of other threads and another version names both keys and their values."""
    other = Profile(replace(HERE, threads=8, torch="2.11.0"), {})
    with pytest.raises(ProfileError, match=r"torch = '2.11.0' there, '2.13.0' here; threads = 8 there, 1 here"):
        Profile(HERE, TIMINGS).merged(other, "p.json")
    assert Profile(HERE, {}).merged(Profile(HERE, TIMINGS), "p.json").timings == TIMINGS


@pytest.mark.parametrize("text", ["", "{}", '{"profile_format": 99, "environment": {}, "timings": []}', "[1]"])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    """The error names the file and the remedy."""
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ProfileError, match=r"p\.json.*autopar profile -o"):
        Profile.load(tmp_path / "p.json")


def test_corrupted_store_is_refused(tmp_path: Path) -> None:
    """Bytes that are no database: the error names the file and what to do."""
    (tmp_path / "s").write_bytes(b"not a database, but long enough to have a header" * 50)
    with pytest.raises(ProfileError, match=r"AUTOPAR_CACHE_DIR"):
        Store(tmp_path / "s").profile(HERE)


def _add_many(path: Path, first: int) -> None:
    for i in range(first, first + 10):
        Store(path).add(HERE, {CollectiveKey("all_reduce", i, 2): Timing(Sample((1.0,)))})


def test_processes_share_a_store(tmp_path: Path) -> None:
    """Four processes that write at once lose nothing."""
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=_add_many, args=(tmp_path / "s", 10 * i)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(Store(tmp_path / "s").profile(HERE).timings) == 40


def test_cache_directory_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AUTOPAR_CACHE_DIR says where the store lies."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    assert cache_directory() == tmp_path
    assert Store().path.parent == tmp_path
