"""Rules of ops along dims and at places (orders, transforms, scatters, copies), run sharded against whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.shard.trying import Call, assert_sharded_equals_whole, complexes, named, positive, reals, truth, whole

MESHES = ((3,), (2, 2))


def _each(names: str, *arguments: Any, offered: str) -> list[Call]:
    return [(name, arguments, {}, offered) for name in names.split()]


def _definite(*shape: int) -> Tensor:
    """Symmetric matrices whose eigenvalues are 1 and more."""
    root = reals(*shape, shape[-1])
    return root @ root.mT + torch.eye(shape[-1], dtype=torch.float64)


CALLS: list[Call] = [
    *_each("all.dim", truth(4, 6), 1, offered="d0"),
    *_each("amin", reals(4, 6, 8), [1], offered="d0 d2"),
    *_each("argmin", reals(4, 6), 1, offered="d0"),
    *_each("min.dim", reals(4, 6), 0, offered="d1"),
    *_each("prod.dim_int", reals(4, 6), 0, offered="d1"),
    *_each("_softmax _log_softmax", reals(4, 6, 8), -1, False, offered="d0 d1"),
    *_each("_safe_softmax", reals(4, 6, 8), 1, offered="d0 d2"),
    *_each("cumprod", positive(4, 6), 1, offered="d0"),
    *_each("glu", reals(4, 6, 8), 1, offered="d0 d2"),
    *_each("argsort cummax cummin logcumsumexp", reals(4, 6), 0, offered="d1"),
    *((f"{name}.stable", (reals(4, 6),), {"stable": True}, "d0") for name in ("sort", "argsort")),
    *_each("topk kthvalue", reals(4, 6), 2, offered="d0"),
    *_each("var_mean.dim std_mean.dim", reals(4, 6), [1], offered="d0"),
    *_each("count_nonzero.dim_IntList", whole(2, 4, 6), [1], offered="d0"),
    ("aminmax", (reals(4, 6),), {"dim": 1}, "d0"),
    *_each("fft_fft fft_ifft", complexes(5, 5), offered="d0"),
    *_each("fft_rfft", reals(5, 5), None, 0, offered="d1"),
    *_each("fft_irfft", complexes(5, 5), offered="d0"),
    *_each("fft_fft2 fft_ifft2", complexes(5, 5, 3), offered="d0"),
    *_each("fft_rfft2", reals(5, 5, 3), offered="d0"),
    *_each("fft_fftn fft_ifftn", complexes(4, 6, 3), None, [0, 2], offered="d1"),
    *_each("fft_rfftn", reals(5, 5, 3), None, [2], offered="d0 d1"),
    *_each("fft_irfft2", complexes(5, 5, 3), offered="d0"),
    *_each("fft_irfftn", complexes(5, 5, 3), None, [0, 2], offered="d1"),
    *_each("median.dim mode", reals(4, 6), 0, offered="d1"),
    *_each("norm.ScalarOpt_dim", reals(4, 6), 2, [1], offered="d0"),
    *_each("nansum", reals(4, 6), [1], offered="d0"),
    *_each("diagonal", reals(4, 6, 3, 6), 0, 1, 3, offered="d0 d2"),
    *_each("diag_embed", reals(4, 6), offered="d0"),
    ("linalg_cross", (reals(4, 3, 6), reals(4, 3, 6)), {"dim": 1}, "d0 d2"),
    *_each("bucketize.Tensor", reals(4, 6), reals(5).sort().values, offered="d0 d1"),
    *_each("index_fill.int_Scalar", reals(4, 6), 1, whole(6, 2), 0.5, offered="d0"),
    *_each("inverse linalg_inv matrix_exp linalg_matrix_exp linalg_qr", reals(4, 6, 6), offered="d0"),
    *_each("linalg_cholesky", _definite(4, 6), offered="d0"),
    *_each("linalg_eigh", _definite(4, 6), offered="d0"),
    *_each("cosine_similarity", reals(4, 6), reals(4, 6), offered="d0"),
    *_each("view_as_complex", reals(4, 6, 2), offered="d0 d1"),
    *_each("view_as_real", complexes(4, 6), offered="d0 d1"),
    *_each("prelu", reals(4, 6, 3), reals(6), offered="d0 d1 d2"),
    *_each("prelu", reals(4, 6), reals(1), offered="d0 d1"),
    *_each("triu", reals(4, 6, 6), offered="d0 +"),
    *_each("mT mH adjoint", reals(4, 6, 8), offered="d0 d1 d2 +"),
    *_each("movedim.intlist moveaxis.intlist", reals(4, 6, 8), [0, 2], [1, 0], offered="d0 d1 d2"),
    *_each("swapaxes swapdims", reals(4, 6, 8), 0, -1, offered="d0 d1 d2"),
    *_each("slice_scatter", reals(4, 6), reals(4, 2), 1, 1, 3, offered="d0"),
    *_each("select_scatter", reals(4, 6, 8), reals(4, 8), 1, 2, offered="d0 d2"),
    *_each("repeat tile", reals(4, 6), [2, 1, 3], offered="d0"),
    *_each("repeat_interleave.self_int", reals(4, 6), 2, 1, offered="d0"),
    *_each("unfold", reals(4, 6), 1, 3, 2, offered="d0"),
    *_each("scatter.src scatter_add", reals(4, 6), 1, whole(6, 4, 3), reals(4, 3), offered="d0"),
    *_each("scatter.value", reals(4, 6), 0, whole(4, 2, 6), 0.5, offered="d1"),
    *_each("scatter_reduce.two", reals(4, 6), 1, whole(6, 4, 3), reals(4, 3), "amax", offered="d0"),
    *_each("index_add index_copy", reals(4, 6, 8), 1, whole(2, 3) * 3, reals(4, 3, 8), offered="d0 d2"),
    *_each("cdist", reals(4, 6, 3), reals(4, 8, 3), offered="d0 m n"),
    *_each("select.int", reals(4, 6), 0, 2, offered="d1 +"),
    *_each("narrow", reals(4, 6), 0, 1, 2, offered="d1"),
    *_each("constant_pad_nd", reals(4, 6), [1, 1], offered="d0"),
    *_each("ones zeros", [4, 6], offered="d0 d1"),
    *_each("new_full", reals(2), [4, 6], 3.0, offered="d0 d1"),
    *_each("new_zeros", reals(2), [4, 6], offered="d0 d1"),
    *_each("eye", 4, offered=""),
    *_each("linspace", 0, 1, 5, offered=""),
    *_each("scalar_tensor", 2.0, offered=""),
    *_each("native_dropout", reals(5, 5), 0.5, False, offered="d0 d1"),
    *_each("nll_loss2d", reals(4, 5, 6, 4), whole(5, 4, 6, 4), None, 2, -100, offered="n n1 n2"),
    *_each("kl_div", reals(4, 6), positive(4, 6), 1, offered="d0 d1"),
    *_each("smooth_l1_loss", reals(4, 6), reals(4, 6), 1, offered="d0 d1"),
    *_each("soft_margin_loss", reals(4, 6), whole(2, 4, 6) * 2 - 1, 2, offered="d0 d1"),
    *_each("binary_cross_entropy", reals(4, 6).sigmoid(), whole(2, 4, 6).double(), None, 1, offered="d0 d1"),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=named(CALLS))
def test_sharded_equals_whole(call: Call) -> None:
    """The expected factors are on offer, and results and gradients are the same under every one of them."""
    assert_sharded_equals_whole(call, MESHES)
