"""`cute-flash explain --cp N`: bytes, hops and predicted times of each method of context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cute_flash.distributed.choice import choice_by_bytes
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.problem import Problem
from cute_flash.tools.text import aligned
from layouts.studies.cp_cost import HBM_SHARE, LINK_SHARE, LINKS, Cost, Model, Pass

COLUMNS = ("method", "hops", "sent", "compute", "passes", "communication", "not hidden", "total", "efficiency")


@dataclass(frozen=True)
class ContextParallelExplanation:
    """The costs of a problem on the ranks of a group. A model, not a measurement."""

    model: Model

    @staticmethod
    def of(problem: Problem, ranks: int, link: str, gpu: ArchSpec) -> ContextParallelExplanation:
        problem.check("cuda")
        return ContextParallelExplanation(Model(problem, ranks, LINKS[link], gpu))

    @cached_property
    def costs(self) -> list[Cost]:
        return self.model.costs()

    def lines(self) -> list[str]:
        m, p = self.model, self.model.problem
        choice = choice_by_bytes(m.sent())
        head = aligned(
            [
                f"problem B={p.batch} H={p.heads} Hkv={p.heads_kv} S={p.seqlen_q} D={p.head_dim} {p.dtype}, {p.band}",
                f"ranks {m.ranks} x {m.gpu.gpu}, {m.kind} shards of {m.sharding.shard_length:,} tokens",
                f"link {m.link.name}, {m.link.gbps:g} GB/s from each GPU",
            ]
        )
        rows = [COLUMNS, *(_row(cost) for cost in self.costs)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        notes = aligned([f"auto {choice}", f"unsharded {self.costs[0].single_ms:.2f} ms on one GPU"])
        rates = "rates measured on one H200" + ("" if m.gpu.gpu == "H200" else ", scaled by the peak of this GPU")
        return [
            *head,
            "",
            *table,
            "",
            *notes,
            "Times in ms, forward + backward. Total = compute + passes + not hidden.",
            "Hops: groups of shards that a ring receives, or collectives. Sent: bytes of a rank, forward and backward.",
            "Passes: merges, sums and copies in memory. Not hidden: communication that no computation overlaps.",
            "Efficiency: speed-up over one GPU / ranks.",
            f"A model: {rates}, {LINK_SHARE:.0%} of the link and {HBM_SHARE:.0%} of HBM. The times are not measured.",
        ]

    def as_dict(self) -> dict[str, Any]:
        m = self.model
        return {
            "ranks": m.ranks,
            "link": m.link.name,
            "gpu": m.gpu.gpu,
            "shard_length": m.sharding.shard_length,
            "auto": choice_by_bytes(m.sent()).method,
            "sent_bytes": m.sent(),
            "methods": [cost.as_dict() for cost in self.costs],
        }


def _row(cost: Cost) -> tuple[str, ...]:
    def both(name: str) -> str:
        return " + ".join(f"{_value(x, name):.2f}" for x in (cost.forward, cost.backward))

    times = (both(name) for name in ("compute", "passes", "communication", "exposed", "total"))
    return cost.method, str(cost.hops), f"{cost.sent / 1e6:,.0f} MB", *times, f"{cost.efficiency:.0%}"


def _value(x: Pass, name: str) -> float:
    return getattr(x, name)
