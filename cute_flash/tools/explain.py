"""What a problem costs on a GPU and how it will be run: the plan, the roofline, the bounds of the papers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cute_flash.planning.plan import Plan, plan
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.problem import Problem
from cute_flash.tools import roofline

LABEL_WIDTH = 12


def aligned(lines: list[str]) -> list[str]:
    """Lines of "label  text" from several reports, their texts in one column."""
    return [f"{label:<{LABEL_WIDTH}}{text}" for label, text in (line.split(None, 1) for line in lines)]


@dataclass(frozen=True)
class Explanation:
    plan: Plan
    # Every tensor moved once: no kernel can move less.
    least: roofline.Roofline
    # K and V moved once per row tile, as without any cache.
    reread: roofline.Roofline

    @staticmethod
    def of(problem: Problem, arch: ArchSpec) -> Explanation:
        # Contiguous tensors, whose heads can be packed.
        chosen = plan(problem, arch, is_packable=True)
        return Explanation(
            chosen,
            roofline.roofline(problem, arch),
            roofline.roofline(problem, arch, chosen.tile.tile_m, chosen.tile.tile_n),
        )

    @property
    def papers_sram_bytes(self) -> int:
        """The papers' bound for this tile, with S and O in shared memory too."""
        tile, element_bytes = self.plan.tile, roofline.ELEMENT_BYTES[self.plan.problem.dtype]
        return roofline.sram_bytes(tile.tile_m, tile.tile_n, tile.head_dim, element_bytes)

    def lines(self) -> list[str]:
        limit, papers = self.plan.arch.smem_per_block, self.papers_sram_bytes
        verdict = "fits" if papers <= limit else "does not fit; the kernel keeps S and O in registers"
        return aligned(
            [
                *self.plan.lines(),
                *self.least.lines(),
                f"re-reads    {self.reread.bytes / 1e6:.3f} MB if each row tile read K and V from memory, "
                f"{self.reread.intensity:.1f} FLOP/B",
                f"rescales    at most {self.reread.max_rescales} per row",
                f"SRAM        {papers / 1024:.0f} KB by the papers' formula (Q, K, V, S, O, m, l of a tile), "
                f"of {limit / 1024:.0f} KB: {verdict}",
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes, seconds and counts without prefixes."""
        chosen, least = self.plan, self.least
        return {
            "problem": asdict(chosen.problem),
            "gpu": chosen.arch.gpu,
            "arch": chosen.arch.name,
            "kernel": chosen.key.kernel,
            "target": chosen.key.target,
            "tile": asdict(chosen.tile),
            "smem_bytes": chosen.tile.smem_bytes,
            "smem_limit_bytes": chosen.arch.smem_per_block,
            "papers_sram_bytes": self.papers_sram_bytes,
            "tiles": chosen.num_tiles,
            "blocks": chosen.num_blocks,
            "flops": least.flops,
            "flops_nominal": roofline.flops_nominal(chosen.problem),
            "exps": least.exps,
            "least_bytes": least.bytes,
            "unfused_bytes": least.standard_bytes,
            "reread_bytes": self.reread.bytes,
            "intensity": least.intensity,
            "ridge": least.ridge,
            "bound": least.bound,
            "seconds": least.seconds,
            "attainable_tflops": least.attainable_tflops,
            "max_rescales": self.reread.max_rescales,
        }
