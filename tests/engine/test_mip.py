"""Mixed-integer programs assembled from arrays."""

from __future__ import annotations

import ctypes

import pytest

from autopar.engine.mip import own_words_to_stderr


def test_solvers_words_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    """What a library written in C prints while it solves is not on standard output, then or later."""
    with own_words_to_stderr():
        ctypes.CDLL(None).puts(b"from C")
    print("from Python")
    out, err = capfd.readouterr()
    assert (out, err) == ("from Python\n", "from C\n")
