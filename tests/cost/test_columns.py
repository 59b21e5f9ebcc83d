from __future__ import annotations

import time

import numpy as np
import pytest

from autopar.cluster import load_cluster
from autopar.cost.columns import Integers, column_operand, column_times, one_call
from autopar.cost.recorder import Recorder
from autopar.cost.roofline import RooflinePricer
from autopar.graph import Dtype, Operand, OpKey

CALLS = 5


def tensor(*shape: int | Integers, grad: bool = True) -> Operand:
    return column_operand(shape, "bfloat16", grad)


def keys() -> list[OpKey]:
    """Operators of every kind of formula over batches of 1 to 9."""
    b = np.array([1, 2, 3, 8, 9])
    x, vector = tensor(b, 128, 512), tensor(512)
    heads, image = tensor(b, 8, 128, 64), tensor(b, 16, 32, 32)
    return [
        OpKey("aten.linear.default", (x, tensor(2048, 512), tensor(2048))),
        OpKey("aten.addmm.default", (vector, tensor(128 * b, 512, grad=False), tensor(512, 512))),
        OpKey("aten.matmul.default", (heads, tensor(b, 8, 64, 128))),
        OpKey("aten.einsum.default", ("bsh,bth->bst", (x, x))),
        OpKey("aten.scaled_dot_product_attention.default", (heads, heads, heads, None, 0.0, True)),
        OpKey("aten.conv2d.default", (image, tensor(32, 16, 3, 3), None, (1, 1), (1, 1))),
        OpKey("aten.conv_transpose2d.default", (image, tensor(16, 8, 2, 2))),
        OpKey("aten.add.Tensor", (x, vector)),
        OpKey("aten.add.Tensor", (tensor(b, 1), tensor(1, 4))),
        OpKey("aten.mul.Tensor", (x, tensor(1, 128, 1))),
        OpKey("aten.layer_norm.default", (x, (512,), vector, vector)),
        OpKey("aten.softmax.int", (x, -1)),
        OpKey("aten.expand.default", (tensor(1, 128), (b, 128))),
        OpKey("aten.embedding.default", (tensor(1000, 512), column_operand((b, 128), "int64", False))),
        OpKey("aten.slice.Tensor", (x, 1, 0, 64)),
        OpKey("aten.transpose.int", (x, 0, 1)),
        OpKey("aten.cat.default", ((x, x), 1)),
        OpKey("aten.to.dtype", (x, Dtype("float32"))),
        OpKey("aten.sum.default", (x,)),
        OpKey("aten.max_pool2d.default", (image, 2)),
        OpKey("aten.zeros.default", ((4, 4),)),
        OpKey("optimizer.adamw.step", (tensor(512 * b, 512),)),
    ]


@pytest.mark.parametrize("name", ["8xa100-80gb", "8xrtx4090-24gb"])
def test_columns_are_priced_as_their_calls_are(name: str) -> None:
    """Each call of a key with columns has the seconds and the source of its own key, asked of alone."""
    pricer = RooflinePricer(load_cluster(name))
    found = column_times(keys(), CALLS, pricer)
    for i, key in enumerate(keys()):
        alone = pricer.ops([one_call(key, call) for call in range(CALLS)])
        np.testing.assert_allclose(found.forward_s[i], alone.forward_s, rtol=1e-12, err_msg=key.target)
        np.testing.assert_allclose(found.backward_s[i], alone.backward_s, rtol=1e-12, err_msg=key.target)
        assert set(found.sources[i]) <= set(alone.sources)  # calls without any work count as roofline


def test_keys_that_differ_in_lengths_are_priced_as_alone() -> None:
    """Keys of one operator, of numbers and columns and lengths of 1 mixed, cost together what each costs alone."""
    pricer, b = RooflinePricer(load_cluster("8xa100-80gb")), np.array([1, 2, 3, 8, 9])
    alike = [
        OpKey("aten.linear.default", (tensor(rows, 64, inner), tensor(outer, inner)))
        for rows, outer, inner in ((b, 512, 256), (4, 512, 256), (1, 1024, 256), (2 * b, 1024, 512), (b, 1, 512))
    ]
    alike += [OpKey("aten.add.Tensor", (tensor(b, n), tensor(b, n))) for n in (1, 64, 128)]
    alike += [OpKey("aten.add.Tensor", (tensor(b, n), tensor(n))) for n in (1, 64, 128)]
    alike += [OpKey("aten.expand.default", (tensor(1, n), (m, n))) for n, m in ((64, b), (64, 7), (128, b))]
    alike += [OpKey("autopar.offload.default", (tensor(n, 64 * b),)) for n in (2, 3)]
    together = column_times(alike, CALLS, pricer)
    for i, key in enumerate(alike):
        alone = pricer.ops([one_call(key, call) for call in range(CALLS)])
        np.testing.assert_allclose(together.forward_s[i], alone.forward_s, rtol=1e-12, err_msg=repr(key))
        np.testing.assert_allclose(together.backward_s[i], alone.backward_s, rtol=1e-12, err_msg=repr(key))


def test_pricers_that_time_are_asked_for_single_calls() -> None:
    """A pricer without columns is asked for each call's own key."""
    recorder = Recorder(RooflinePricer(load_cluster("8xa100-80gb")))
    key = OpKey("aten.gelu.default", (tensor(np.array([1, 2]), 64),))
    assert column_times([key], 2, recorder).forward_s.shape == (1, 2)
    assert list(recorder.ops_s) == [OpKey("aten.gelu.default", (tensor(n, 64),)) for n in (1, 2)]


def test_half_a_million_predictions_a_second() -> None:
    """Forward and backward of a layer's operators over 100 sizes take less than 2 microseconds of CPU time a call."""
    pricer = RooflinePricer(load_cluster("8xa100-80gb"))
    x = tensor(np.arange(1, 101), 1024, 4096)
    layer = [OpKey("aten.linear.default", (x, tensor(4096, 4096))), OpKey("aten.gelu.default", (x,)),
             OpKey("aten.layer_norm.default", (x, (4096,), tensor(4096), tensor(4096)))]  # fmt: skip
    column_times(layer, 100, pricer)
    start = time.process_time()
    column_times(layer * 100, 100, pricer)
    assert time.process_time() - start < 2e-6 * 100 * len(layer) * 100
