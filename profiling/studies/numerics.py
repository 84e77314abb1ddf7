"""Errors of the online softmax against fp64 on the CPU: by length, tile width, rescales, distribution and accumulator.

Every case computes attention of a few rows of queries, with inputs in fp32 or 16 bits, and compares it with fp64 on
the same inputs. `WAYS` are versions of one loop that differ only in how O and l are accumulated:

    fp32            scores, P, products and accumulators in fp32: the loop of the CPU path
    fp32, Kahan     O and l as compensated sums of the blocks' fp32 products
    fp64 sums       O and l in fp64; scores, P and the products of a block in fp32
    fp64 after S    everything after the fp32 scores in fp64
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cute_flash import attn, reference
from cute_flash.spec.band import Band
from layouts.studies.loops import tiled_q_outer
from profiling.measure.accuracy import draw, errors_of
from profiling.measure.shapes import ALL_DTYPES
from profiling.measure.study import Record, Step, Tools

NORMAL, OUTLIERS, LONG_TAILED = DISTRIBUTIONS = ("normal", "outliers", "long-tailed")
CPU_DTYPES = ALL_DTYPES


# Q, K, V and the number of keys in a block -> O
Way = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _blocks(q: Tensor, k: Tensor, v: Tensor, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The fp32 scores and the values of each K/V block."""
    scale = q.shape[-1] ** -0.5
    for start in range(0, k.shape[2], block):
        keys = slice(start, start + block)
        yield (q @ k[:, :, keys].mT) * scale, v[:, :, keys]


def _start(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """O, m and l before the first block."""
    rows = q.shape[:3]
    return (
        q.new_zeros((*rows, v.shape[-1]), dtype=dtype),
        q.new_full((*rows, 1), -torch.inf),
        q.new_zeros((*rows, 1), dtype=dtype),
    )


def online_fp32(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    return tiled_q_outer(q, k, v, Band(), None, q.shape[2], block)[0]


def online_kahan(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    """O and l are Kahan sums. A rescale multiplies sum and correction; its rounding is not corrected."""
    O, m, l = _start(q, v, torch.float32)
    O_lost, l_lost = torch.zeros_like(O), torch.zeros_like(l)
    for S, V in _blocks(q, k, v, block):
        m_new = torch.maximum(m, S.amax(-1, keepdim=True))
        P, alpha = torch.exp(S - m_new), torch.exp(m - m_new)
        O, O_lost = kahan_add(alpha * O, alpha * O_lost, P @ V)
        l, l_lost = kahan_add(alpha * l, alpha * l_lost, kahan_sum(P))
        m = m_new
    return O / l


def kahan_add(total: Tensor, lost: Tensor, term: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of `total` and `term`, and its rounding error, which the next call subtracts from its term."""
    corrected = term - lost
    new = total + corrected
    return new, (new - total) - corrected


def kahan_sum(P: Tensor) -> Tensor:
    """Row sums of P, one key after the other."""
    total = lost = torch.zeros_like(P[..., :1])
    for key in P.split(1, dim=-1):
        total, lost = kahan_add(total, lost, key)
    return total


def online_fp64_sums(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    O, m, l = _start(q, v, torch.float64)
    for S, V in _blocks(q, k, v, block):
        m_new = torch.maximum(m, S.amax(-1, keepdim=True))
        P, alpha = torch.exp(S - m_new), torch.exp((m - m_new).double())
        O, l = alpha * O + P @ V, alpha * l + P.sum(-1, keepdim=True, dtype=torch.float64)
        m = m_new
    return (O / l).float()


def online_fp64_after_scores(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    O, m, l = _start(q, v, torch.float64)
    for S, V in _blocks(q, k, v, block):
        m_new = torch.maximum(m, S.amax(-1, keepdim=True))
        P, alpha = torch.exp(S.double() - m_new.double()), torch.exp((m - m_new).double())
        O, l = alpha * O + P @ V.double(), alpha * l + P.sum(-1, keepdim=True)
        m = m_new
    return (O / l).float()


WAYS: dict[str, Way] = {
    "fp32": online_fp32,
    "fp32, Kahan": online_kahan,
    "fp64 sums": online_fp64_sums,
    "fp64 after S": online_fp64_after_scores,
}
# Beside the loops: unfused attention in fp32.
UNFUSED = "fp32, unfused"


def error_record(
    study: str, way: str, distribution: str, out: Tensor, exact: Tensor, seqlen: int,
    block: int | None = None, rescales: float | None = None,
) -> Record:  # fmt: skip
    """The errors of one case.

    Args:
        study: "length", "tile", "rescales" or "dtype".
        way: Of `WAYS`, `UNFUSED`, or a dtype.
        block: Keys of a K/V block.
        rescales: The average number of rescales of a row.
    """
    errors = errors_of(out, exact)
    return {
        "study": study,
        "way": way,
        "distribution": distribution,
        "seqlen": seqlen,
        "block": block,
        "rescales": rescales,
        "relative": errors.relative,
        "max_abs": errors.max_abs,
        "max_exact": float(exact.abs().max()),
    }


@dataclass(frozen=True)
class Sizes:
    """The sizes of the study on the CPU."""

    rows: int = 64
    heads: int = 4
    head_dim: int = 64
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    block: int = 64
    seqlen: int = 4096  # of the studies of tile width and rescales
    blocks: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 1024, 4096)
    rescale_block: int = 16
    growing: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # blocks in which the maximum of a row grows
    seed: int = 0

    def inputs(self, distribution: str, seqlen: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        queries, keys = ((1, self.heads, length, self.head_dim) for length in (self.rows, seqlen))
        q, k, v = (draw(distribution, size, generator) for size in (queries, keys, keys))
        return q, k, v


SMALL = Sizes(8, 1, 16, (32, 64), 16, 64, (4, 16, 64), 4, (1, 4, 16))


def _rescales(q: Tensor, k: Tensor, v: Tensor, block: int) -> float:
    _, _, traffic = tiled_q_outer(q, k, v, Band(), None, q.shape[2], block)
    return traffic.rescales / q[..., 0].numel()


def _online(
    study: str, distribution: str, q: Tensor, k: Tensor, v: Tensor, block: int, ways: Iterable[str]
) -> Iterator[Record]:
    exact, rescales = reference.dense(q, k, v)[0], _rescales(q, k, v, block)
    for way in ways:
        out = WAYS[way](q, k, v, block)
        yield error_record(study, way, distribution, out, exact, k.shape[2], block, rescales)


def by_length(sizes: Sizes) -> Iterator[Record]:
    """Longer and longer sequences, with K/V blocks of a fixed width."""
    for distribution in DISTRIBUTIONS:
        for seqlen in sizes.lengths:
            q, k, v = sizes.inputs(distribution, seqlen)
            yield from _online("length", distribution, q, k, v, sizes.block, WAYS)
            unfused, exact = reference.dense_low_precision(q, k, v)[0], reference.dense(q, k, v)[0]
            yield error_record("length", UNFUSED, distribution, unfused, exact, seqlen)


def by_tile(sizes: Sizes) -> Iterator[Record]:
    """Wider and wider K/V blocks of the same keys: fewer rescales, longer sums within a block."""
    for distribution in DISTRIBUTIONS:
        q, k, v = sizes.inputs(distribution, sizes.seqlen)
        for block in sizes.blocks:
            yield from _online("tile", distribution, q, k, v, block, WAYS)


def growing_order(scores: Tensor, block: int, growing: int) -> Tensor:
    """An order of the keys in which the maximum grows in each of the first `growing` blocks, and then no more.

    The blocks with the largest scores come first, in ascending order; the others follow in descending order.
    """
    descending = scores.argsort(descending=True)
    largest = descending[: growing * block].flip(0)
    return torch.cat([largest, descending[growing * block :]])


def by_rescales(sizes: Sizes) -> Iterator[Record]:
    """The same keys in other orders, so that only the number of rescales differs.

    All queries have the same direction, so that one order of the keys serves all rows.
    """
    q, k, v = sizes.inputs(NORMAL, sizes.seqlen)
    direction = q[:, :, :1]
    q = direction * torch.linspace(1.0, 2.0, sizes.rows)[:, None]
    scores = (direction @ k.mT)[0, :, 0]
    for growing in sizes.growing:
        orders = [growing_order(one_head, sizes.rescale_block, growing) for one_head in scores]
        K, V = (torch.stack([x[0, head, order] for head, order in enumerate(orders)])[None] for x in (k, v))
        yield from _online("rescales", NORMAL, q, K, V, sizes.rescale_block, WAYS)


def by_dtype(sizes: Sizes) -> Iterator[Record]:
    """`attn` on the CPU with 16-bit and fp32 inputs, against fp64 on the rounded inputs."""
    for distribution in DISTRIBUTIONS:
        for seqlen in sizes.lengths:
            inputs = sizes.inputs(distribution, seqlen)
            for name, dtype in CPU_DTYPES.items():
                q, k, v = (x.to(dtype) for x in inputs)
                yield error_record("dtype", name, distribution, attn(q, k, v), reference.dense(q, k, v)[0], seqlen)


STUDIES = {"length": by_length, "tile": by_tile, "rescales": by_rescales, "dtype": by_dtype}


def measure_study(name: str, sizes: Sizes) -> list[Record]:
    """One study. One thread: sums of a matrix product then have the same order on every machine with one library."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            found = list(STUDIES[name](sizes))
    finally:
        torch.set_num_threads(threads)
    if wrong := [one for one in found if one["relative"] is None]:
        raise ArithmeticError(f"study {name}: an error is not finite: {wrong[0]}")
    return found


def steps(sizes: Sizes, tools: Tools) -> list[Step]:
    return [Step("records", name, partial(measure_study, name, sizes)) for name in STUDIES]
