"""Predictions for a profiled launch: shared-memory wavefronts and conflicts, DRAM bytes, least time."""

from __future__ import annotations

from dataclasses import dataclass

from cute_flash.planning.plan import Plan
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import ceil_div
from cute_flash.spec.dtypes import DTYPE_BYTES
from cute_flash.spec.problem import Problem
from layouts.kernels import Count, Use, Work, predict, sm80_uses, sm90_uses
from profiling.ncu_case import Case
from profiling.ncu_metrics import METRICS

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
    dram_read_bytes: int  # every input once: the caches are cold
    dram_write_bytes: int  # every output once: nothing stays in the caches
    flops: float
    seconds: float  # at the peak rate of the tensor cores
    shared: dict[str, Count] | None  # by instruction; None: not predicted

    @property
    def metrics(self) -> dict[str, float]:
        """By names of `ncu_metrics.METRICS`; metrics without a prediction are left out."""
        predicted: dict[str, float] = {
            "dram_read_bytes": self.dram_read_bytes,
            "dram_write_bytes": self.dram_write_bytes,
        }
        if self.shared is not None:
            for name, instructions in COUNTED.items():
                count = sum((self.shared[one] for one in instructions), Count())
                # The hardware counts no wavefront of cp.async as a conflict.
                predicted[f"{name}_conflicts"] = 0 if name.endswith("ldgsts") else count.conflicts
                predicted[f"{name}_wavefronts"] = count.wavefronts
                # The counters of ld.shared and st.shared include other instructions, but no ldmatrix or stmatrix.
                if name not in ("ld", "st"):
                    predicted[f"{name}_instructions"] = count.instructions
        return {name: value for name, value in predicted.items() if name in METRICS}


def uses_of(plan: Plan) -> tuple[Use, ...]:
    tile = plan.tile
    return sm80_uses(tile) if isinstance(tile, FwdTileSm80) else sm90_uses(tile)


def work_of(plan: Plan) -> Work:
    """The query tiles of a launch and the K/V blocks that they visit, exact under any band."""
    p, tile = plan.problem, plan.tile
    heads = p.batch * p.heads
    rows = [
        p.band.blocks(m_block, tile.tile_m, tile.tile_n, p.seqlen_q, p.seqlen_k)
        for m_block in range(ceil_div(p.seqlen_q, tile.tile_m))
    ]
    return Work(heads * len(rows), heads * sum(max(0, blocks.end - blocks.begin) for blocks in rows))


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
    problem, flops = case.shape.problem(case.dtype), case.shape.flops(case.direction)
    seconds = flops / (spec.tensor_tflops * 1e12)
    if case.direction == "bwd":
        return Expected(*_backward_bytes(problem), flops, seconds, None)
    plan = case.plan(spec)
    return Expected(*_forward_bytes(problem), flops, seconds, predict(uses_of(plan), work_of(plan)))
