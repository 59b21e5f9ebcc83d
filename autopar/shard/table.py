"""The registry: a line, or what makes one from the op's arguments, for each op by name."""

from __future__ import annotations

from autopar.errors import ConfigError
from autopar.graph import DTYPE_BYTES, Ref
from autopar.shard import losses, places
from autopar.shard import structured as make
from autopar.shard.notation import parse
from autopar.shard.structured import LineMaker, Site

POINTWISE = """
    abs acos asin atan atan2 ceil celu clamp clamp_max clamp_min cos cosh elu erf erfc exp exp2 expm1 floor frac gelu
    hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 log_sigmoid logit mish neg nan_to_num pow reciprocal
    relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc
    add addcdiv addcmul div floor_divide fmod lerp maximum minimum mul remainder rsub sub true_divide
    __and__ __or__ __xor__ bitwise_and bitwise_not bitwise_or bitwise_xor eq ge gt isfinite isinf isnan le logical_and
    logical_not logical_or logical_xor lt ne masked_fill where
    _to_copy alias clone contiguous copy detach expand lift_fresh_copy to broadcast_to
    empty_like full_like ones_like zeros_like fill zero
    acosh asinh atanh complex polar real imag conj angle copysign deg2rad rad2deg digamma erfinv float_power heaviside
    hardshrink hypot i0 lgamma logaddexp logaddexp2 positive signbit sinc softshrink special_entr xlogy isneginf
    isposinf threshold nextafter gcd lcm bitwise_left_shift bitwise_right_shift lift clip absolute negative multiply
    subtract divide greater greater_equal less less_equal not_equal arctan arctan2 fix resolve_conj resolve_neg
"""
"""Elementwise ops with broadcasting, copies, casts and `expand` (broadcasting alone)."""

VIEWS = """
    _unsafe_view flatten reshape squeeze unflatten unsqueeze view
"""
"""Ops that only reshape."""

PAIR_LOSSES = "huber_loss kl_div l1_loss mse_loss smooth_l1_loss soft_margin_loss"
"""Losses of pairs of elements whose third argument is the reduction."""

REDUCTIONS = "all amax amin any argmax argmin logsumexp max median min mode nansum prod std var"
"""Reductions whose dims can't be split: partial results of theirs are no sums."""

SPATIAL = """
    max_pool avg_pool adaptive_max_pool adaptive_avg_pool upsample_nearest _upsample_nearest_exact reflection_pad
    replication_pad
"""
"""Ops over the last one, two or three dims of a tensor, named with their number."""

RESIZING = {"upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3,
            "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2}  # fmt: skip
"""Others of the kind that are there for one number only, and which."""

MATRICES = "inverse linalg_inv linalg_cholesky linalg_matrix_exp matrix_exp"
"""Functions of square matrices, the last two dims."""

LINEAR_OPS = """
    _to_copy _unsafe_view alias broadcast_to clone contiguous expand expand_as flatten mean neg permute reshape select
    slice split split_with_sizes chunk squeeze sum t to transpose mT mH adjoint tril triu unbind unflatten
    unsqueeze view
"""
"""Ops linear in their only tensor operand, whatever their other arguments."""

RULES: dict[str, str | LineMaker] = {
    "autopar.opaque": make.opaque,
    "aten.linear": "... k, n k, + n -> ... n",
    "aten.mm": "m k, k n -> m n",
    "aten.bmm": "b m k, b k n -> b m n",
    "aten.mv": "m k, k -> m",
    **dict.fromkeys(("aten.dot", "aten.vdot"), "k, k ->"),
    "aten.outer": "m, n -> m n",
    "aten.addmm": "+ m n, m k, k n -> m n",
    "aten.baddbmm": "+ b m n, b m k, b k n -> b m n",
    "aten.matmul": make.matmul,
    "aten.einsum": make.einsum,
    **{f"aten.conv{n}d": make.convolution for n in (1, 2, 3)},
    **{f"aten.conv_transpose{n}d": make.transposed_convolution for n in (1, 2, 3)},
    **{f"aten.{name}{n}d": make.spatial(n) for name in SPATIAL.split() for n in (1, 2, 3)},
    **{f"aten.{name}": make.spatial(n) for name, n in RESIZING.items()},
    **{f"aten.max_pool{n}d_with_indices": make.spatial(n) for n in (1, 2, 3)},
    **dict.fromkeys(("aten.pixel_shuffle", "aten.pixel_unshuffle"), "... _ _ _ -> ... _ _ _ | d0!, d1!"),
    "aten.channel_shuffle": "... _ _ _ -> ... _ _ _",
    **dict.fromkeys(("aten.layer_norm", "aten.rms_norm", "aten.native_layer_norm"), make.normalised),
    "aten.group_norm": make.group_norm,
    "aten.instance_norm": make.instance_norm,
    **dict.fromkeys(("aten.batch_norm", "aten._native_batch_norm_legit_functional"), make.batch_norm),
    "aten.scaled_dot_product_attention": make.attention,
    "aten.embedding": make.embedding,
    "aten.one_hot": "... -> ... _",
    **dict.fromkeys(("aten.dropout", "aten.native_dropout"), make.dropout),
    "aten.cross_entropy_loss": losses.cross_entropy,
    **dict.fromkeys(("aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d"), losses.nll),
    **{f"aten.{name}": losses.elementwise_loss(2) for name in PAIR_LOSSES.split()},
    "aten.binary_cross_entropy": losses.elementwise_loss(3),
    "aten.binary_cross_entropy_with_logits": losses.elementwise_loss(4),
    **{f"aten.{name}": make.pointwise for name in POINTWISE.split()},
    **dict.fromkeys(("aten.max.other", "aten.min.other"), make.pointwise),
    **{f"aten.{name}": make.view for name in VIEWS.split()},
    **dict.fromkeys(("aten.t", "aten.mT", "aten.mH", "aten.adjoint", "aten.transpose"), make.transpose),
    "aten.permute": make.permute,
    "aten.sum": make.summed(),
    "aten.mean": make.summed("mean"),
    **{f"aten.{name}": make.along(1, "dim") for name in REDUCTIONS.split()},
    **dict.fromkeys(("aten.linalg_vector_norm", "aten.norm"), make.along(2, "dim")),
    **dict.fromkeys(
        ("aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax", "aten._safe_softmax"),
        make.along(1, "dim"),
    ),
    **dict.fromkeys(("aten.cumsum", "aten.cumprod", "aten.flip", "aten.glu"), make.along(1, "dim", -1)),
    **dict.fromkeys(
        ("aten.sort", "aten.argsort", "aten.logcumsumexp", "aten.cummax", "aten.cummin"), make.along(1, "dim", -1)
    ),
    **dict.fromkeys(("aten.sort.stable", "aten.argsort.stable"), make.along(2, "dim", -1)),
    **dict.fromkeys(("aten.topk", "aten.diff", "aten.kthvalue"), make.along(2, "dim", -1)),
    **dict.fromkeys(("aten.var_mean", "aten.std_mean", "aten.count_nonzero", "aten.aminmax"), make.along(1, "dim")),
    **{f"aten.fft_{name}": make.along(2, "dim", -1, solid=True) for name in ("fft", "ifft", "rfft", "irfft")},
    **{f"aten.fft_{name}2": make.along(2, "dim", (-2, -1), solid=True) for name in ("fft", "ifft", "rfft", "irfft")},
    **{f"aten.fft_{name}n": make.along(2, "dim", solid=True) for name in ("fft", "ifft", "rfft", "irfft")},
    "aten.cosine_similarity": make.along(2, "dim", 1),
    "aten.view_as_complex": "... _ -> ...",
    "aten.view_as_real": "... -> ... _",
    "aten.prelu": make.prelu,
    "aten.roll": make.along(2, "dims"),
    **dict.fromkeys(("aten.tril", "aten.triu"), "... _ _ -> ... _ _"),
    **dict.fromkeys(("aten.movedim", "aten.moveaxis"), make.movedim),
    **dict.fromkeys(("aten.swapaxes", "aten.swapdims"), make.transpose),
    "aten.slice_scatter": places.slice_scatter,
    "aten.select_scatter": places.select_scatter,
    **dict.fromkeys(("aten.repeat", "aten.tile"), places.repeat),
    "aten.repeat_interleave": places.repeat_interleave,
    "aten.unfold": places.unfold,
    **dict.fromkeys(("aten.scatter", "aten.scatter_add", "aten.scatter_reduce"), places.scatter),
    **dict.fromkeys(("aten.index_add", "aten.index_copy"), places.index_add),
    "aten.im2col": "b _ _ _ -> b _ _",
    "aten.col2im": "b _ _ -> b _ _ _ | b!",
    "aten.diag_embed": places.diag_embed,
    "aten.diagonal": places.diagonal,
    "aten.linalg_cross": make.along(2, "dim", -1),
    "aten.bucketize.Tensor": "..., _ -> ...",
    "aten.index_fill": places.index_fill,
    **{f"aten.{name}": "... _ _ -> ... _ _" for name in MATRICES.split()},
    "aten.linalg_qr": "... _ _ -> ... _ _, ... _ _",
    "aten.linalg_eigh": "... _ _ -> ... _, ... _ _",
    "aten.cdist": "... m _, ... n _ -> ... m n",
    "aten.grid_sampler": make.grid_sampler,
    **{f"aten.{name}.input": make.recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "aten.lstm_cell": "b _, b _, b _, _ _, _ _, _, _ -> b _, b _ | b!",
    **{f"aten.{name}_cell": "b _, b _, _ _, _ _, _, _ -> b _ | b!" for name in ("gru", "rnn_tanh", "rnn_relu")},
    "aten._weight_norm": make.weight_norm,
    "aten.slice": make.sliced,
    **dict.fromkeys(("aten.select", "aten.unbind", "aten.narrow"), make.along(1, "dim", 0)),
    **dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.chunk"), make.along(2, "dim", 0)),
    "aten.cat": make.cat,
    "aten.stack": make.stack,
    **dict.fromkeys(("aten.pad", "aten.constant_pad_nd"), make.pad),
    "aten.index": places.index,
    "aten.index_select": places.index_select,
    "aten.gather": places.gather,
    **dict.fromkeys(("aten.full", "aten.ones", "aten.zeros", "aten.empty"), "-> ..."),
    **dict.fromkeys(("aten.new_full", "aten.new_ones", "aten.new_zeros"), make.new),
    **dict.fromkeys(("aten.arange", "aten.eye", "aten.linspace", "aten.scalar_tensor"), make.constant),
}
"""Lines by op: by overload (`aten.max.other`) or else by name for all overloads (`aten.linear`)."""


def register(target: str, line: str) -> str:
    """Add or replace the line of an op: `mylib::op`, `mylib.op` or `mylib.op.overload`; returns its name with dots.

    Raises ConfigError when the target is no such name or the line can't be read.
    """
    name = target.replace("::", ".")
    parts = name.split(".")
    if len(parts) not in (2, 3) or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{target!r} names no operator; write 'namespace::name' or 'namespace.name.overload'.")
    parse(line)
    RULES[name] = line
    return name


def line_of(site: Site) -> str | None:
    """The line of an op in place; None when it has no rule, or draws random numbers for all samples at once."""
    from autopar.trace.randomness import draws_whole  # needs torch, which the tables of names don't

    if draws_whole(site.op):
        return None
    name = site.op.target
    entry = RULES.get(name) or RULES.get(name.rpartition(".")[0])
    return entry(site) if callable(entry) else entry


def is_linear(site: Site) -> bool:
    """Whether partial sums may pass: the op is linear in all its tensor operands together, and loses no precision."""
    specs = (*site.operands, *site.results)
    widths = [DTYPE_BYTES[spec.dtype] for spec in specs]
    if not site.operands or not all("float" in spec.dtype for spec in specs) or widths != sorted(widths):
        return False
    name = site.op.target.split(".")[1]
    if len(site.operands) > 1:
        return name in ("add", "sub", "cat", "stack")
    if name in ("mul", "div"):
        return isinstance(site.op.args[0], Ref) and not site.op.target.endswith("_mode")
    return name in LINEAR_OPS.split() and site.op.target.startswith("aten.")
