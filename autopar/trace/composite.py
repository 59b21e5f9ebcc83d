"""Operators that torch makes of others which have rules, where they have none themselves."""

from __future__ import annotations

_NAMES = """
    adjoint atleast_1d atleast_2d atleast_3d block_diag cartesian_prod corrcoef cosine_embedding_loss cov cross
    cumulative_trapezoid det hinge_embedding_loss kron linalg_det linalg_matrix_norm linalg_norm linalg_vecdot
    margin_ranking_loss matrix_H nanmean pairwise_distance poisson_nll_loss rot90 take_along_dim tensordot
    triplet_margin_loss vander
"""
COMPOSITE = frozenset(f"aten.{name}.default" for name in _NAMES.split()) | {
    "aten.linalg_norm.ord_str", "aten.linalg_matrix_norm.str_ord", "aten.norm.Scalar", "aten.trapz.dx",
    "aten.trapezoid.dx",
}  # fmt: skip
"""Targets that are taken apart while a model is traced."""
