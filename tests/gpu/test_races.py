"""Repeated calls have equal bits: the output, and the gradients that no atomic additions sum.

A race between warps changes a few scores in some of the calls. The bias is larger than L2 (except the shared one), so
that its loads take long.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import cute_flash
from cute_flash.planning.plan import CompileKey
from cute_flash.spec.arch import ArchSpec
from tests.cases import CAUSAL, FULL
from tests.covering import covering
from tests.gpu.calls import Call, dense

pytestmark = pytest.mark.gpu

RUNS = 30
BATCH, HEADS = 2, 16
# At head dim 96, calls without features have another tile for more than 2048 keys.
LENGTH, LENGTH_96 = 1024, 2304
CALLS = [
    *itertools.product(
        ("sm90",), ("", "bias", "shared bias", "dropout", "softcap", "alibi"), (64, 96, 128, 192, 256), (False, True)
    ),
    *itertools.product(("sm80",), ("", "dropout"), (64, 96, 128, 192, 256), (False, True)),
]
CALLS = covering(CALLS, tuple)


def keys(arch: ArchSpec, runnable: list[str]) -> Iterator[CompileKey]:
    """The kernels of the calls without a bias."""
    for family, feature, head_dim, causal in CALLS:
        if family in runnable and "bias" not in feature:
            length, band = length_of(head_dim), CAUSAL if causal else FULL
            features = {feature: 0.2} if feature else {}
            yield from Call(dense(1, HEADS, 1, length, length, head_dim, band=band, features=features), family).keys(
                arch
            )


def length_of(head_dim: int) -> int:
    return LENGTH_96 if head_dim == 96 else LENGTH


def options_of(feature, bias):
    if feature == "bias":
        return {"bias": bias}
    if feature == "shared bias":
        return {"bias": bias[:1].detach().requires_grad_()}
    values = {"dropout": 0.2, "softcap": 20.0, "alibi": torch.linspace(0.1, 1.0, HEADS, device="cuda")}
    return {feature: values[feature]} if feature else {}


@pytest.mark.parametrize(("family", "feature", "head_dim", "causal"), CALLS, indirect=["family"])
def test_repeated_calls_have_equal_bits(family, feature, head_dim, causal, known_rng):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()

    length = length_of(head_dim)
    q, k, v, dout = (normal(BATCH, HEADS, length, head_dim) for _ in range(4))
    options = options_of(feature, normal(BATCH, HEADS, length, length) if "bias" in feature else None)
    leaves = [k, v, *([options["bias"]] if "bias" in feature else [])]
    first, different = None, 0
    for _ in range(RUNS):
        out = cute_flash.attn(q, k, v, causal=causal, **options)
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout.detach())]
        first = first or found
        different += not all(torch.equal(x, y) for x, y in zip(found, first, strict=True))
    assert not different, f"{different} of {RUNS} calls differ from the first"
