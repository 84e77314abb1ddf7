"""Predictions for a profiled launch: shared-memory wavefronts and conflicts, DRAM bytes, least time."""

from __future__ import annotations

from dataclasses import dataclass

from cute_flash.planning.plan import Plan
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90, BwdTileSm90Wide
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.dtypes import DTYPE_BYTES
from cute_flash.spec.problem import Problem
from layouts.backward import bwd_sm80_uses, bwd_sm90_uses, bwd_sm90_wide_uses
from layouts.kernels import Count, Use, Work, predict, sm80_uses, sm90_uses
from profiling.counters.l2_model import dram_bytes
from profiling.counters.ncu_case import Case
from profiling.counters.ncu_metrics import METRICS

FP32_BYTES = 4
# Group of counters -> the instructions that it counts.
COUNTED = {
    "ld": ("ldmatrix", "ld.shared"),
    "st": ("st.shared", "stmatrix"),
    "ldgsts": ("cp.async",),
    "ldsm": ("ldmatrix",),
    "sass_ldsm": ("ldmatrix",),
    "sass_st": ("st.shared",),
    "sass_ldgsts": ("cp.async",),
}


@dataclass(frozen=True)
class Expected:
    dram_read_bytes: int  # by `l2_model`
    dram_write_bytes: int
    least_read_bytes: int  # every input once
    output_bytes: int  # every output once, whether it reaches DRAM before the kernel ends or not
    flops: float
    seconds: float  # at the peak rate of the tensor cores
    shared: dict[str, Count]  # by instruction

    @property
    def metrics(self) -> dict[str, float]:
        """By names of `ncu_metrics.METRICS`; metrics without a prediction are left out."""
        predicted: dict[str, float] = {
            "dram_read_bytes": self.dram_read_bytes,
            "dram_write_bytes": self.dram_write_bytes,
        }
        for name, instructions in COUNTED.items():
            count = sum((self.shared[one] for one in instructions), Count())
            # The hardware counts no wavefront of cp.async as a conflict.
            predicted[f"{name}_conflicts"] = 0 if name.endswith("ldgsts") else count.conflicts
            predicted[f"{name}_wavefronts"] = count.wavefronts
            # The instruction counts of "ld" and "st" have no prediction: they exclude ldmatrix and stmatrix, and
            # include other instructions.
            if name not in ("ld", "st"):
                predicted[f"{name}_instructions"] = count.instructions
        return {name: value for name, value in predicted.items() if name in METRICS}


def uses_of(plan: Plan) -> tuple[Use, ...]:
    """The shared-memory accesses of a plan's main kernel."""
    uses = {
        FwdTileSm80: sm80_uses,
        FwdTileSm90: sm90_uses,
        BwdTileSm80: bwd_sm80_uses,
        BwdTileSm90: bwd_sm90_uses,
        BwdTileSm90Wide: bwd_sm90_wide_uses,
    }
    return uses[type(plan.tile)](plan.tile)


def work_of(plan: Plan) -> Work:
    """The number of tiles of a launch and of the blocks that they visit, exact for any causal mask or window.

    In the forward, tiles of queries visit blocks of keys; in the backward, tiles of keys visit blocks of queries.
    """
    p, tile = plan.problem, plan.tile
    if plan.main.kernel.startswith("fwd"):
        band, (tile_rows, block_rows), (rows, others) = p.band, (tile.tile_m, tile.tile_n), (p.seqlen_q, p.seqlen_k)
        heads = p.batch * p.heads
    else:
        band, (tile_rows, block_rows) = Band(p.band.right, p.band.left), (tile.tile_n, tile.tile_m)
        (rows, others), heads = (p.seqlen_k, p.seqlen_q), p.batch * p.heads_kv
    ranges = [band.blocks(i, tile_rows, block_rows, rows, others) for i in range(ceil_div(rows, tile_rows))]
    visits = sum(max(0, blocks.end - blocks.begin) for blocks in ranges)
    return Work(heads * len(ranges), p.batch * p.heads * visits)


def _forward_bytes(problem: Problem) -> tuple[int, int]:
    """Read: Q, K and V. Written: O and the LSE."""
    p, size = problem, DTYPE_BYTES[problem.dtype]
    rows = p.heads * p.seqlen_q
    read = p.batch * (rows * p.head_dim + p.heads_kv * p.seqlen_k * (p.head_dim + p.width_v)) * size
    return read, p.batch * rows * (p.width_v * size + FP32_BYTES)


def _backward_bytes(problem: Problem) -> tuple[int, int]:
    """Of the main kernel. Read: Q, K, V, dO, LSE, delta and dq_accum; written: dK, dV and dq_accum."""
    p, size = problem, DTYPE_BYTES[problem.dtype]
    rows, keys = p.batch * p.heads * p.seqlen_q, p.batch * p.heads_kv * p.seqlen_k
    sums = rows * p.head_dim * FP32_BYTES
    read = (rows + keys) * (p.head_dim + p.width_v) * size + 2 * rows * FP32_BYTES + sums
    return read, keys * (p.head_dim + p.width_v) * size + sums


def expected(case: Case, spec: ArchSpec) -> Expected:
    problem, flops, plan = case.shape.problem(case.dtype), case.shape.flops(case.direction), case.plan(spec)
    seconds = flops / (spec.tensor_tflops * 1e12)
    least = _backward_bytes(problem) if case.direction == "bwd" else _forward_bytes(problem)
    return Expected(*dram_bytes(plan), *least, flops, seconds, predict(uses_of(plan), work_of(plan)))
