"""Operations on captured numbers alone: computed by Python for each call, without another trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_flash import attn
from cute_flash.score_mod import trace
from cute_flash.score_mod.trace import bind

S = 9
COLUMN = torch.arange(S, dtype=torch.float64)
LATER, EARLIER = 1.7e9 + 0.25, 1.7e9  # equal in fp32
MILLION, HUGE, TINY = 2**20, 1e300, 1e-300

# Numbers as a mod computes them from captured numbers.
NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "difference": lambda x, y: (LATER + x) - (EARLIER + x) + y,
    "numpy": lambda x, y: (np.float64(LATER) - np.float64(EARLIER)) * y + x,
    "remainder": lambda x, y: (1e9 + 0.5 + x) % (7.25 + y),
    "product": lambda x, y: (HUGE * x) * (TINY * y),
    "quotient": lambda x, y: x / y - x // y,
    "comparison": lambda x, y: (LATER + x > EARLIER + y) * 3 + (x > y),
    "negative": lambda x, y: -x + abs(-y) + x**2,
}


def scores(q: Tensor, number: Any) -> Tensor:
    """The output of attention with `number` · kv_idx added to the scores, in fp64."""
    return torch.softmax(q.double() @ q.double().mT / math.sqrt(q.shape[-1]) + float(number) * COLUMN, -1) @ q.double()


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_the_values_of_python(name: str) -> None:
    compute, q = NUMBERS[name], torch.randn(1, 2, S, 8, generator=torch.Generator().manual_seed(1))
    x, y = 3.0, 2.0

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + compute(x, y) * j

    first = bind(mod, "score_mod").graph
    before = trace.num_traces
    for x, y in ((3.0, 2.0), (2.0, 5.5), (0.25, 0.125)):
        torch.testing.assert_close(attn(q, q, q, score_mod=mod).double(), scores(q, compute(x, y)), atol=2e-5, rtol=0)
    assert trace.num_traces == before and bind(mod, "score_mod").graph == first


@pytest.mark.parametrize(
    "compute",
    [lambda n: n * n, lambda n: n << 30, lambda n: abs(-n * 2048), lambda n: n * n // 2 * 2, lambda n: n * (1 << 35)],
    ids=["product", "shift", "abs", "chain", "constant"],
)
def test_ints_beyond_32_bits_do_not_wrap(compute: Callable[[Any], Any]) -> None:
    n = MILLION
    far = bind(lambda b, h, i, j: j < compute(n), "mask_mod").graph
    assert any(node.kind == "int64" and node.value == compute(n) for node in far.nodes)
    q = torch.randn(1, 1, S, 8)
    torch.testing.assert_close(attn(q, q, q, mask_mod=lambda b, h, i, j: j < compute(n)), attn(q, q, q))


def test_a_number_that_outgrows_32_bits_is_traced_again() -> None:
    n, q = 100, torch.randn(1, 1, S, 8)

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j < n * n

    before = trace.num_traces
    for n in (2, 3, 1 << 17, 1):
        seen = attn(q[..., :1, :], q[..., : min(n * n, S), :], q[..., : min(n * n, S), :])
        torch.testing.assert_close(attn(q[..., :1, :], q, q, mask_mod=near), seen)
    assert trace.num_traces > before


def test_a_number_without_a_value_is_computed_by_the_kernel() -> None:
    """Like torch, and unlike Python, a kernel divides by zero."""
    x, zero = 1.0, 0.0
    graph = bind(lambda s, b, h, i, j: s + x / zero * j, "score_mod").graph
    assert any(node.op == "div" for node in graph.nodes) and graph.scalars == ("float", "float")


def test_python_can_use_a_computed_number() -> None:
    """The captured numbers behind it are compiled in."""
    m, n = 2, 3
    graph = bind(lambda s, b, h, i, j: sum(s * k for k in range(m * n)), "score_mod").graph
    assert graph.scalars == () and sum(node.op == "mul" for node in graph.nodes) == 5  # s * 1 is s
