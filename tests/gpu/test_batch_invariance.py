"""`batch_invariant=True`, forward: a row has the same bits alone, in chunks and among other sequences."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cute_flash
from cute_flash import reference
from cute_flash.planning.plan import CompileKey
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import Band
from cute_flash.spec.family import FAMILIES
from tests.covering import covering
from tests.fakes.recording import forward_keys

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]

SQ, SK, NEIGHBOURS = 150, 700, (1, 2, 7, 64, 300)
HEAD_DIMS = (64, 96, 128, 256)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (200, 50)},
    "softcap": {"softcap": 8.0, "causal": True},
}
CALLS = covering(list(itertools.product(FAMILIES, HEAD_DIMS, OPTIONS)), tuple)


def keys(arch: ArchSpec, runnable: list[str]) -> Iterator[CompileKey]:
    for family, head_dim, name in CALLS:
        if family not in runnable:
            continue
        options = OPTIONS[name]
        q, k, v = drawn(head_dim, 2, "cpu")
        band = Band.of(options.get("causal", False), options.get("window", (None, None)))
        args = reference.plain_args(q, band)._replace(
            batch_invariant=True, deterministic=True, softcap=options.get("softcap", 0.0), kernel_family=family
        )
        yield from forward_keys(q, k, v, args, arch)


def drawn(head_dim: int, batch: int, device: str = "cuda") -> list[torch.Tensor]:
    """Random inputs. Every seventh row of q is six times as large, so that later K/V blocks raise its row maximum."""
    generator = torch.Generator().manual_seed(head_dim)
    shapes = ((4, SQ), (2, SK), (2, SK))
    q, k, v = (torch.randn(batch, *shape, head_dim, generator=generator) for shape in shapes)
    q[:, :, ::7] *= 6
    return [x.to(device, torch.bfloat16) for x in (q, k, v)]


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    return cute_flash.attn(q, k, v, batch_invariant=True, return_lse=True, **options)


@pytest.mark.parametrize(("family", "head_dim", "name"), CALLS, indirect=["family"])
def test_among_neighbours(family: str, head_dim: int, name: str) -> None:
    options = OPTIONS[name]
    q, k, v = drawn(head_dim, max(NEIGHBOURS))
    alone = run(q[:1], k[:1], v[:1], **options)
    for batch in NEIGHBOURS:
        for place in (0, batch - 1):
            order = [1 + i for i in range(batch - 1)]
            order.insert(place, 0)
            found = run(*(x[order] for x in (q, k, v)), **options)
            assert all(torch.equal(a[place], b[0]) for a, b in zip(found, alone, strict=True)), (batch, place)


@pytest.mark.parametrize("head_dim", (64, 128))
def test_queries_in_chunks(head_dim: int) -> None:
    """Causal: a chunk sees the keys up to its own end."""
    q, k, v = drawn(head_dim, 1)
    whole = run(q, k, v, causal=True)
    for chunk in (1, 7, 64):
        for first in (0, 70, SQ - chunk):
            rows = slice(first, first + chunk)
            seen = SK - SQ + first + chunk
            found = run(q[:, :, rows], k[:, :, :seen], v[:, :, :seen], causal=True)
            for a, b in zip(found, whole, strict=True):
                assert torch.equal(a, b[:, :, rows]), (chunk, first)


def test_is_attention() -> None:
    q, k, v = drawn(128, 2)
    out, lse = run(q, k, v, causal=True)
    plain, plain_lse = cute_flash.attn(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(lse, plain_lse, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out, plain, rtol=2e-2, atol=1e-2)
