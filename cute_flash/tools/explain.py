"""`cute-flash explain`: the plan of a problem, its roofline, and the bounds of the FlashAttention papers.

Calls with few queries run the decode kernel, which splits the keys among CTAs: `cute_flash.tools.explain_decode`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cute_flash.planning.decode import splits_keys
from cute_flash.planning.plan import Plan, plan_forward
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.dtypes import DTYPE_BYTES
from cute_flash.spec.family import requested_family
from cute_flash.spec.problem import Problem
from cute_flash.tools import roofline
from cute_flash.tools.explain_decode import DecodeExplanation, DecodeShape
from cute_flash.tools.text import aligned


def explain(problem: Problem, arch: ArchSpec) -> Explanation | DecodeExplanation:
    """Explain a call of `attn`, by the kernel that computes it."""
    if not requested_family() and splits_keys(problem, arch):
        return DecodeExplanation.of(DecodeShape.of(problem), arch)
    return Explanation.of(problem, arch)


@dataclass(frozen=True)
class Explanation:
    plan: Plan
    least: roofline.Roofline  # every tensor is read or written once, and all SMs are busy
    occupancy: roofline.Occupancy
    reread_bytes: int  # if every query tile reads K and V from memory, as without L2
    max_rescales: int
    papers_sram_bytes: int  # shared memory of this tile by the papers' formula, which includes S and O

    @staticmethod
    def of(problem: Problem, arch: ArchSpec) -> Explanation:
        # `can_pack_gqa`: tensors are assumed to be contiguous.
        plan = plan_forward(problem, arch, requested_family(), can_pack_gqa=True)
        tile_m, tile_n = plan.tile.tile_m, plan.tile.tile_n
        return Explanation(
            plan,
            roofline.roofline(problem, arch),
            roofline.Occupancy(plan),
            reread_bytes=roofline.fa_bytes(problem, tile_m, plan.pack_gqa),
            max_rescales=roofline.max_rescales(problem, tile_m, tile_n),
            papers_sram_bytes=roofline.sram_bytes(tile_m, tile_n, plan.tile.head_dim, DTYPE_BYTES[problem.dtype]),
        )

    def lines(self) -> list[str]:
        limit, papers = self.plan.arch.smem_per_cta, self.papers_sram_bytes
        intensity = self.least.flops / self.reread_bytes if self.reread_bytes else 0.0
        verdict = "fits" if papers <= limit else "does not fit; the kernel keeps S and O in registers"
        pieces = roofline.piece_bytes(self.plan.problem)
        return aligned(
            [
                *self.plan.lines(),
                *self.least.lines(),
                *([f"pieces      {pieces / 1e6:.3f} MB more, to split q, k and v into fp16 pieces"] if pieces else []),
                *self.occupancy.lines(),
                f"re-reads    {self.reread_bytes / 1e6:.3f} MB if each query tile reads K and V from memory, "
                f"{intensity:.1f} FLOP/B",
                f"rescales    at most {self.max_rescales} per row",
                f"SRAM        {papers / 1024:.0f} KB by the papers' formula (Q, K, V, S, O, m, l of a tile), "
                f"of {limit / 1024:.0f} KB: {verdict}",
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """The explanation for JSON, in bytes, seconds and counts.

        "blocks" is the number of CTAs of the grid. "seconds" and "bound" are those of this grid; "roofline_seconds"
        and "attainable_tflops" those of a GPU whose SMs are all busy.
        """
        plan, least = self.plan, self.least
        return {
            "problem": asdict(plan.problem) | {"band": plan.problem.band.as_dict()},
            "gpu": plan.arch.gpu,
            "arch": plan.arch.name,
            "kernel": plan.main.kernel,
            "target": plan.main.target,
            "tile": asdict(plan.tile),
            "smem_bytes": plan.tile.smem_bytes,
            "smem_limit_bytes": plan.arch.smem_per_cta,
            "papers_sram_bytes": self.papers_sram_bytes,
            "tiles": plan.sizes["num_tiles"],
            "blocks": plan.sizes["num_ctas"],
            "flops": least.flops,
            "flops_nominal": roofline.flops_nominal(plan.problem),
            "exps": least.exps,
            "least_bytes": least.bytes,
            "piece_bytes": roofline.piece_bytes(plan.problem),
            "unfused_bytes": least.standard_bytes,
            "reread_bytes": self.reread_bytes,
            "intensity": least.intensity,
            "mmas_per_product": least.mmas_per_product,
            "ridge": least.ridge,
            "busy_sms": self.occupancy.busy_sms,
            "used_rows": self.occupancy.used_rows,
            "bound": self.occupancy.bound,
            "seconds": self.occupancy.seconds,
            "roofline_bound": least.bound,
            "roofline_seconds": least.seconds,
            "attainable_tflops": least.attainable_tflops,
            "max_rescales": self.max_rescales,
        }
