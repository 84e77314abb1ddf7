"""The least time that `cute-flash explain` gives for few queries, against the clock."""

from __future__ import annotations

import pytest
import torch

import cute_flash
from cute_flash.spec.arch import detect
from cute_flash.spec.problem import Problem
from cute_flash.tools.demo import _seconds
from cute_flash.tools.explain import Explanation

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("heads", "heads_kv", "seqlen_q"),
    [(64, 8, 1), (8, 8, 1), (32, 32, 16)],
    ids=["pack_gqa", "one query", "16 queries"],
)
def test_the_time_of_few_queries(heads: int, heads_kv: int, seqlen_q: int) -> None:
    seqlen_k, head_dim = 32768, 128
    q = torch.randn(1, heads, seqlen_q, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, heads_kv, seqlen_k, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = Explanation.of(Problem(1, heads, heads_kv, seqlen_q, seqlen_k, head_dim), detect(0)).occupancy
    assert expected.busy_sms < expected.plan.arch.num_sms
    seconds = _seconds(lambda: cute_flash.attn(q, k, v))
    # The clock may be above the datasheet's.
    assert 0.9 * expected.seconds <= seconds <= 3 * expected.seconds, (seconds, expected.unit_seconds)
