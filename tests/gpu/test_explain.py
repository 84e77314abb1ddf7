"""The lower bound of the time that `cute-flash explain` prints for few queries, against measured time."""

from __future__ import annotations

import pytest
import torch

import cute_flash
from cute_flash.spec.arch import detect
from cute_flash.spec.problem import Problem
from cute_flash.tools.demo import _seconds
from cute_flash.tools.explain import Explanation, explain
from cute_flash.tools.explain_decode import DecodeExplanation
from tests.gpu import families

pytestmark = pytest.mark.gpu


SHAPES = pytest.mark.parametrize(
    ("heads", "heads_kv", "seqlen_q"),
    [(64, 8, 1), (8, 8, 1), (32, 32, 16)],
    ids=["pack_gqa", "one query", "16 queries"],
)
SEQLEN_K, HEAD_DIM = 32768, 128


def seconds_of(heads: int, heads_kv: int, seqlen_q: int) -> float:
    q = torch.randn(1, heads, seqlen_q, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, heads_kv, SEQLEN_K, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return _seconds(lambda: cute_flash.attn(q, k, v))


@SHAPES
def test_the_time_of_few_queries(heads: int, heads_kv: int, seqlen_q: int) -> None:
    """With a kernel family that the caller chooses, which does not split keys."""
    with cute_flash.use_kernels(families.runnable()[0]):
        expected = Explanation.of(Problem(1, heads, heads_kv, seqlen_q, SEQLEN_K, HEAD_DIM), detect(0)).occupancy
        assert expected.busy_sms < expected.plan.arch.num_sms
        seconds = seconds_of(heads, heads_kv, seqlen_q)
    # The GPU clock may exceed that of the data sheet.
    assert 0.9 * expected.seconds <= seconds <= 3 * expected.seconds, (seconds, expected.unit_seconds)


@SHAPES
def test_the_time_of_split_keys(heads: int, heads_kv: int, seqlen_q: int) -> None:
    expected = explain(Problem(1, heads, heads_kv, seqlen_q, SEQLEN_K, HEAD_DIM), detect(0))
    assert isinstance(expected, DecodeExplanation)
    seconds = seconds_of(heads, heads_kv, seqlen_q)
    # K and V that fit in L2 are not read from HBM.
    least = 0.0 if expected.kv_bytes < 2 * expected.arch.l2_bytes else 0.9 * expected.seconds
    assert least <= seconds <= 3 * expected.seconds + 20e-6, (seconds, expected.unit_seconds)
