"""FLOPs, bytes and exponentials of a problem, and its roofline on a GPU: the unit that bounds its time.

The numbers are exact for any band: visible pairs are counted, not estimated by halving. Three units can be the bound:
the tensor cores (two products of 2 D FLOPs per visible pair; for fp32 three MMAs of fp16 pieces per product), the
memory (every tensor once, or K and V once per query tile), and the exponential units (one exp2 per visible pair), which
are the bound at small head dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cute_flash.planning.plan import Plan
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.dtypes import DTYPE_BYTES
from cute_flash.spec.problem import Problem

# m, l and the LSE are fp32.
STATISTIC_BYTES = 4
# Bytes that L2 delivers to one SM in a clock.
L2_BYTES_PER_CLOCK = 64


def visible_pairs(problem: Problem) -> int:
    """(query, key) pairs of one head inside the band."""
    return _pairs(problem.band, problem.seqlen_q, problem.seqlen_k)


def _pairs(band: Band, sq: int, sk: int) -> int:
    (left, right), chunk = band.bounds, band.chunk
    if chunk is not None:
        # The queries and keys of a chunk are a problem of their own, aligned bottom right.
        ends = ((first, min(first + chunk, sk)) for first in range(0, sk, chunk))
        return sum(_pairs(Band(left, right), end - max(first, min(end, sk - sq)), end - first) for first, end in ends)
    # Σ hi(i) - Σ lo(i). A row that sees no key has lo = hi = 0, so lo never exceeds hi.
    upper = sq * sk if right is None else _clamped_sum(sk - sq + right + 1, sq, sk)
    lower = 0 if left is None else _clamped_sum(sk - sq - left, sq, sk)
    return upper - lower


def _clamped_sum(first: int, count: int, cap: int) -> int:
    """Σ over i < count of min(cap, max(0, first + i))."""
    start, stop = min(max(0, -first), count), min(max(0, cap - first), count)
    ramp = (stop - start) * (2 * first + start + stop - 1) // 2
    return ramp + cap * (count - stop)


def _widths(problem: Problem) -> int:
    """The head dim of Q and K plus that of V and O."""
    return problem.head_dim + problem.width_v


def flops(problem: Problem) -> int:
    """FLOPs of Q Kᵀ and P V over the visible pairs, the lower bound of all kernels."""
    return 2 * problem.batch * problem.heads * _widths(problem) * visible_pairs(problem)


def mmas_per_product(problem: Problem) -> int:
    """16-bit MMAs that compute one product of the problem's dtype."""
    return 3 if problem.static.is_fp32 else 1


def flops_nominal(problem: Problem) -> int:
    """FLOPs as the papers count them for published TFLOP/s: every pair, half of them if causal."""
    p = problem
    every_pair = 2 * p.batch * p.heads * p.seqlen_q * p.seqlen_k * _widths(p)
    return every_pair // 2 if p.band.right == 0 else every_pair


def exp_count(problem: Problem) -> int:
    """Exponentials of P: one per visible pair. Rescaling adds at most one per row and K/V block."""
    return problem.batch * problem.heads * visible_pairs(problem)


def hbm_bytes(problem: Problem) -> int:
    """The fewest bytes that a forward moves: Q, K, V are read once, O and the LSE are written once."""
    p = problem
    rows = p.heads * p.seqlen_q + p.heads_kv * p.seqlen_k
    return p.batch * rows * _widths(p) * DTYPE_BYTES[p.dtype] + _lse_bytes(p)


def hbm_bytes_backward(problem: Problem) -> int:
    """The fewest bytes that a backward moves: Q, K, V, O, dO, LSE are read once, dQ, dK, dV are written once."""
    # Each of Q, K, V and O has a gradient of the same size.
    return 2 * hbm_bytes(problem) - _lse_bytes(problem)


def piece_bytes(problem: Problem) -> int:
    """Bytes that an fp32 forward moves beyond `hbm_bytes`; 0 for other dtypes.

    The split kernels read Q, K and V twice, for the norms and for the pieces, and write two fp16 pieces of each
    element. The attention kernel reads the pieces in place of the tensors.
    """
    p = problem
    if not p.static.is_fp32:
        return 0
    elements = p.heads * p.seqlen_q * p.head_dim + p.heads_kv * p.seqlen_k * _widths(p)
    return 3 * p.batch * elements * DTYPE_BYTES[p.dtype]


def standard_bytes(problem: Problem) -> int:
    """Bytes of unfused attention, which also writes and reads S and P."""
    p = problem
    matrix = p.batch * p.heads * p.seqlen_q * p.seqlen_k * DTYPE_BYTES[p.dtype]
    return hbm_bytes(p) - _lse_bytes(p) + 4 * matrix


def fa_bytes(problem: Problem, tile_m: int, pack_gqa: bool = False) -> int:
    """Bytes of FlashAttention without a cache: each head reads its visible K and V once per query tile.

    The traffic of a kernel is between `hbm_bytes` and this: if the tiles of a head run at the same time, L2 serves
    most reads. With `pack_gqa` the query heads of a K/V head share tiles, and each tile reads all keys that at least
    one query of the call sees.
    """
    p, sq, sk, band = problem, problem.seqlen_q, problem.seqlen_k, problem.band
    if pack_gqa:
        keys_read = ceil_div(p.group * sq, tile_m) * (band.hi(sq - 1, sq, sk) - band.lo(0, sq, sk))
        rows = p.heads * sq + p.heads_kv * keys_read
    else:
        tiles = ((first, min(first + tile_m, sq) - 1) for first in range(0, sq, tile_m))
        keys_read = sum(band.hi(last, sq, sk) - band.lo(first, sq, sk) for first, last in tiles)
        rows = p.heads * (sq + keys_read)
    return p.batch * rows * _widths(p) * DTYPE_BYTES[p.dtype] + _lse_bytes(p)


def _lse_bytes(problem: Problem) -> int:
    return problem.batch * problem.heads * problem.seqlen_q * STATISTIC_BYTES


def max_rescales(problem: Problem, tile_m: int, tile_n: int) -> int:
    """The most rescales of a row's accumulator: one per K/V block that it visits after the first."""
    sq, sk, band = problem.seqlen_q, problem.seqlen_k, problem.band
    ranges = (band.blocks(m_block, tile_m, tile_n, sq, sk) for m_block in range(ceil_div(sq, tile_m)))
    return max((max(blocks.end - blocks.begin - 1, 0) for blocks in ranges), default=0)


def sram_bytes(Br: int, Bc: int, d: int, element_bytes: int) -> int:
    """On-chip memory by the papers' formula: tiles of Q, K, V, S and O, and m and l of each row.

    `(Br d + 2 Bc d + Br Bc + Br d) bytes + 2 Br statistics <= SRAM`. The kernels need less shared memory: S, O, m
    and l are in registers.
    """
    return (2 * Br * d + 2 * Bc * d + Br * Bc) * element_bytes + 2 * Br * STATISTIC_BYTES


class Bound:
    """The least time of work that several units share, if each unit runs alone and never waits."""

    @property
    def unit_seconds(self) -> dict[str, float]:
        """The time of each unit, by name."""
        raise NotImplementedError

    @property
    def seconds(self) -> float:
        """The time of the slowest unit, if the others overlap with it completely."""
        return max(self.unit_seconds.values())

    @property
    def bound(self) -> str:
        """The name of the slowest unit."""
        return max(self.unit_seconds, key=self.unit_seconds.__getitem__)


@dataclass(frozen=True)
class Roofline(Bound):
    """A problem on a GPU, with the least traffic. Times are lower bounds: each unit runs alone and never waits."""

    arch: ArchSpec
    flops: int
    bytes: int
    exps: int
    standard_bytes: int
    mmas_per_product: int = 1

    @property
    def tensor_tflops(self) -> float:
        """Peak rate of products in the problem's dtype."""
        return self.arch.tensor_tflops / self.mmas_per_product

    @property
    def ridge(self) -> float:
        """FLOP per byte above which the tensor cores take longer than the memory."""
        return self.arch.ridge / self.mmas_per_product

    @property
    def intensity(self) -> float:
        """FLOP per byte of memory traffic."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def unit_seconds(self) -> dict[str, float]:
        arch = self.arch
        return {
            "tensor": self.flops / (self.tensor_tflops * 1e12),
            "memory": self.bytes / (arch.hbm_tbps * 1e12),
            "exp2": self.exps / (arch.exp2_per_clock * arch.num_sms * arch.clock_ghz * 1e9),
        }

    @property
    def attainable_tflops(self) -> float:
        return self.flops / self.seconds / 1e12 if self.seconds else 0.0

    def lines(self) -> list[str]:
        """The roofline as text."""
        tensor_us, memory_us, exp2_us = (1e6 * seconds for seconds in self.unit_seconds.values())
        unfused_mb, saved = self.standard_bytes / 1e6, self.standard_bytes / self.bytes if self.bytes else 0.0
        mmas = "" if self.mmas_per_product == 1 else f", {self.mmas_per_product} MMAs per product"
        return [
            f"work        {self.flops / 1e9:.3f} GFLOP, {self.exps / 1e6:.3f} M exponentials",
            f"traffic     {self.bytes / 1e6:.3f} MB, unfused {unfused_mb:.3f} MB ({saved:.1f}x)",
            f"intensity   {self.intensity:.1f} FLOP/B, ridge of {self.arch.gpu} {self.ridge:.0f} FLOP/B",
            f"tensor      {tensor_us:.2f} us at {self.tensor_tflops:.0f} TFLOP/s{mmas}",
            f"memory      {memory_us:.2f} us at {self.arch.hbm_tbps:.2f} TB/s",
            f"exp2        {exp2_us:.2f} us at {self.arch.exp2_per_clock} per SM and clock",
            f"bound       {self.bound}: {self.seconds * 1e6:.2f} us, {self.attainable_tflops:.0f} TFLOP/s, "
            "if all SMs are busy",
        ]


def roofline(problem: Problem, arch: ArchSpec) -> Roofline:
    return Roofline(
        arch, flops(problem), hbm_bytes(problem), exp_count(problem), standard_bytes(problem), mmas_per_product(problem)
    )


@dataclass(frozen=True)
class Occupancy(Bound):
    """The least time of a forward plan on the SMs that have a CTA.

    A CTA computes whole tiles: rows beyond the last query cost as much as others. The busiest SM decides. Its tensor
    cores, its exponential units and its path from L2 (`L2_BYTES_PER_CLOCK`) bound the time, and so does the memory of
    the GPU.
    """

    plan: Plan

    @property
    def busy_sms(self) -> int:
        return min(self.plan.sizes["num_ctas"], self.plan.arch.num_sms)

    @property
    def used_rows(self) -> float:
        """The part of the tiles' rows that are queries."""
        problem = self.plan.problem
        rows = self.plan.sizes["num_tiles"] * self.plan.tile.tile_m
        return problem.batch * problem.heads * problem.seqlen_q / rows if rows else 0.0

    @cached_property
    def busiest_sm_blocks(self) -> float:
        """A lower bound of the K/V blocks that the busiest SM visits, for any distribution of the tiles."""
        if not self.busy_sms:
            return 0.0
        problem, tile_m, tile_n = self.plan.problem, self.plan.tile.tile_m, self.plan.tile.tile_n
        sq, sk, band = problem.seqlen_q, problem.seqlen_k, problem.band
        if self.plan.pack_gqa:
            # With pack_gqa, a tile has rows of all queries.
            visited = [band.blocks(0, sq, tile_n, sq, sk)] * ceil_div(problem.group * sq, tile_m)
        else:
            visited = [band.blocks(m_block, tile_m, tile_n, sq, sk) for m_block in range(ceil_div(sq, tile_m))]
        lengths = [max(blocks.end - blocks.begin, 0) for blocks in visited]
        num_tiles = self.plan.sizes["num_tiles"]
        total = sum(lengths) * (num_tiles // len(lengths))
        return max(total / self.busy_sms, max(lengths), ceil_div(num_tiles, self.busy_sms) * min(lengths))

    @property
    def unit_seconds(self) -> dict[str, float]:
        """The time of each unit; "load": of K and V from L2 into the SMs."""
        arch, problem, tile = self.plan.arch, self.plan.problem, self.plan.tile
        keys = self.busiest_sm_blocks * tile.tile_n
        pairs = keys * tile.tile_m
        clock = arch.clock_ghz * 1e9
        flops_of_sm = 2 * pairs * _widths(problem) * mmas_per_product(problem)
        return {
            "tensor": flops_of_sm / (arch.tensor_tflops * 1e12 / arch.num_sms),
            "load": keys * _widths(problem) * DTYPE_BYTES[problem.dtype] / (L2_BYTES_PER_CLOCK * clock),
            "exp2": pairs / (arch.exp2_per_clock * clock),
            "memory": (hbm_bytes(problem) + piece_bytes(problem)) / (arch.hbm_tbps * 1e12),
        }

    def lines(self) -> list[str]:
        *of_sm, memory = (f"{name} {1e6 * seconds:.2f} us" for name, seconds in self.unit_seconds.items())
        return [
            f"occupancy   {self.busy_sms} of {self.plan.arch.num_sms} SMs have a CTA, "
            f"{self.used_rows:.0%} of the tiles' rows are queries",
            f"units       {', '.join(of_sm)} on the busiest SM ({L2_BYTES_PER_CLOCK} B a clock from L2); {memory}",
            f"time        at least {1e6 * self.seconds:.2f} us with this grid, by {self.bound}",
        ]
