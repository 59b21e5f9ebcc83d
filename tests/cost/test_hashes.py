"""Records that keep their hash."""

import os
import pickle
import subprocess
import sys

from autopar.graph import Operand, OpKey


def key(rows: int) -> OpKey:
    return OpKey("aten.clone.default", (Operand((rows, 8), "float32", False),))


def test_records_that_keep_their_hash_are_equal_and_found_as_before() -> None:
    """A record that keeps its hash is found under an equal one, and not under another."""
    known = {key(4): "four"}
    assert known[key(4)] == "four"
    assert key(5) not in known


def test_a_kept_hash_is_not_sent_to_other_processes() -> None:
    """Where texts hash otherwise, a record that was looked up by here is found under an equal one made there."""
    sent = key(4)
    hash(sent)
    code = (
        "import pickle, sys; sent = pickle.load(sys.stdin.buffer); "
        "assert {type(sent)(sent.target, sent.args): 1}[sent] == 1"
    )
    seed = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(sent), env=seed, check=True)
