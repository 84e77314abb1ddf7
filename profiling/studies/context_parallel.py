"""Context parallelism on one GPU: the kernels of all ranks of a ring, compared with the unsharded call.

One GPU runs the kernels of each rank, one rank after the other: the launches on its shards, and the merges and sums
between them. Nothing is sent. Times are device times of CUDA graphs. The sum over ranks divided by the time of the
unsharded call is the cost of sharding. `GOAL` is the largest acceptable cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from cute_flash import ops
from cute_flash.distributed.accumulate import Gradients, Output, Saved, Scores, rows_of
from cute_flash.distributed.comm import Pair
from cute_flash.distributed.ring import Group, Schedule, heads_first, keys_first, max_steps
from cute_flash.distributed.sharding import SHARDINGS, Sharding, join, split
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem
from layouts.studies.cp_cost import LINKS, Model
from profiling.measure.options import MS, ROUNDS, option
from profiling.measure.study import CellFailure, Record, Step, Study, Tools
from profiling.measure.tables import Table, number
from profiling.measure.timing import TimedCall, measure

GOAL = 1.08
DIRECTIONS = ("forward", "backward")
CAUSAL = Band(None, 0)
# The time of the command with its defaults, on an H200: it compiles 7 kernels one after another, then measures for
# about 20 s.
EXPECTED_SECONDS = 40


@dataclass(frozen=True)
class Settings:
    seqlen: int = option(65536)
    ranks: int = option(8)
    heads: int = option(32)
    heads_kv: int = option(8)
    head_dim: int = option(128)
    sharding: str = option("zigzag", choices=SHARDINGS)
    rounds: int = ROUNDS(5)
    ms: float = MS(30.0)
    seed: int = 0

    def check(self) -> None:
        """Raise `ValueError` for a length that is not a multiple of the number of chunks."""
        chunks = self.ranks * (2 if self.sharding == "zigzag" else 1)
        if self.seqlen % chunks:
            raise ValueError(f"--seqlen {self.seqlen} with {self.ranks} ranks: use a multiple of {chunks}")

    @property
    def problem(self) -> Problem:
        sizes = self.heads, self.heads_kv, self.seqlen, self.seqlen, self.head_dim
        return Problem(1, *sizes, "bfloat16", CAUSAL)


DRY_SETTINGS = Settings(seqlen=256, ranks=4, heads=2, heads_kv=2, head_dim=16, rounds=1, ms=1.0)


class Loop:
    """The ring of all ranks, on the shards of one sequence."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        s = settings
        generator = torch.Generator(device).manual_seed(s.seed)
        shapes = [(1, heads, s.seqlen, s.head_dim) for heads in (s.heads, s.heads_kv, s.heads_kv, s.heads)]
        self.full = [torch.randn(x, device=device, generator=generator).bfloat16() for x in shapes]
        self.shards = [split(x, s.ranks, 2, s.sharding).unbind(0) for x in self.full]
        sharding = Sharding.of(s.sharding, s.ranks, s.seqlen)
        self.schedule = Schedule(sharding, CAUSAL, max_steps=max_steps(s.heads, s.heads_kv))
        # Direction -> the ring steps of each group.
        self.steps = {"forward": self.schedule.groups, "backward": self.schedule.backward_groups}
        self.args = AttentionArgs(scale=s.head_dim**-0.5)
        self.scores, self.kind = Scores(self.args), s.sharding
        self.ranks = range(s.ranks)
        self.arrived = {direction: [self.groups(direction, rank) for rank in self.ranks] for direction in DIRECTIONS}
        # (out, lse) of each rank, which its backward needs.
        self.saved: list[tuple[Tensor, Tensor]] = []

    def unsharded(self, direction: str) -> Callable[[], Any]:
        q, k, v, dout = self.full
        args = self.args._replace(window_right=0)
        if direction == "forward":
            return lambda: ops.attention(q, k, v, args)
        out, lse, _ = ops.attention(q, k, v, args)
        return lambda: ops.gradients(dout, None, q, k, v, out, lse, args)

    def groups(self, direction: str, rank: int) -> list[tuple[Pair, Group]]:
        """K and V as a rank receives them, and the calls over them: its own shard, then the groups."""
        _, k, v, _ = self.shards
        found = [((k[rank], v[rank]), Group((), self.schedule.calls(rank, rank)))]
        for steps in self.steps[direction][1:]:
            group = self.schedule.group(rank, steps)
            parts = [[rows_of(x[part.shard], part.keys) for part in group.parts] for x in (k, v)]
            keys, values = (heads_first(keys_first(torch.cat(x, dim=2))) for x in parts)
            found.append(((keys, values), group))
        return found

    def forward(self, rank: int) -> tuple[Tensor, Tensor]:
        q, k, v, _ = self.shards
        keys_first(k[rank]), keys_first(v[rank])  # the copies that a real ring would send
        output = Output(q[rank], v[rank], self.num_calls("forward", rank))
        for kv, group in self.arrived["forward"][rank]:
            for call in group.calls:
                output.add(kv, call, self.scores, None)
        return output.result(None, q[rank].shape[2])

    def without_merges(self, rank: int) -> None:
        """The attention kernels of a rank's forward."""
        q = self.shards[0][rank]
        for kv, group in self.arrived["forward"][rank]:
            for call in group.calls:
                args = self.scores.of_call(call, None)._replace(out_fp32=True)
                ops.attention(rows_of(q, call.rows), rows_of(kv[0], call.keys), rows_of(kv[1], call.keys), args)

    def backward(self, rank: int) -> tuple[Tensor, Pair | None]:
        q, k, v, dout = self.shards
        out, lse = self.saved[rank]
        gradients = Gradients(Saved(dout[rank], None, q[rank], out, lse), self.scores)
        own, total = (k[rank], v[rank]), None
        keys_first(k[rank]), keys_first(v[rank])  # the copies that a real ring would send
        for kv, group in self.arrived["backward"][rank]:
            shares = gradients.add(kv, group.calls, None)
            if not group.parts:
                total = gradients.sum_keys(own, None, shares)
        # Other ranks would send shares of dk and dv of this rank's keys. Tensors of the same shapes replace them.
        for steps in self.steps["backward"][1:]:
            for step in steps:
                keys = self.schedule.keys(self.schedule.holder(rank, step), rank)
                if keys is not None:
                    share = keys, rows_of(own[0], keys), rows_of(own[1], keys)
                    total = gradients.sum_keys(own, total, [share])
        return gradients.dq, total

    def num_calls(self, direction: str, rank: int) -> int:
        return self.schedule.num_calls(rank, self.steps[direction])

    def call(self, direction: str, rank: int) -> Callable[[], Any]:
        return (lambda: self.forward(rank)) if direction == "forward" else (lambda: self.backward(rank))


def errors(loop: Loop) -> dict[str, float]:
    """The largest difference of out and dq from the unsharded call, relative to its largest element."""
    out = loop.unsharded("forward")()[0].float()
    dq = loop.unsharded("backward")()[0].float()
    found = {"out": [loop.saved[rank][0] for rank in loop.ranks], "dq": [loop.backward(rank)[0] for rank in loop.ranks]}
    pairs = {"out": out, "dq": dq}
    joined = {name: join(torch.stack([x.float() for x in shards]), 2, loop.kind) for name, shards in found.items()}
    return {name: float((joined[name] - y).abs().max() / y.abs().max()) for name, y in pairs.items()}


def _prepared(settings: Settings, tools: Tools) -> Loop:
    loop = Loop(settings, tools.device)
    loop.saved = [loop.forward(rank) for rank in loop.ranks]
    return loop


@torch.no_grad()
def measure_direction(make: Callable[[], Loop], direction: str, settings: Settings, tools: Tools) -> Record:
    loop = make()
    predicted = Model(settings.problem, settings.ranks, LINKS["nvlink"], kind=settings.sharding).kernel_ratios()
    timed_calls = {"unsharded": TimedCall(loop.unsharded(direction))}
    timed_calls |= {f"rank {rank}": TimedCall(loop.call(direction, rank)) for rank in loop.ranks}
    if direction == "forward":
        timed_calls["rank 0, without merges"] = TimedCall(lambda: loop.without_merges(0))
    measured = measure(timed_calls, tools.timer, settings.rounds, settings.ms)
    times = {name: samples.median_ms for name, samples in measured.samples.items()}
    ranks = [times.get(f"rank {rank}") for rank in loop.ranks]
    found: Record = {
        "ms": times,
        "errors": measured.errors,
        "calls_of_a_rank": loop.num_calls(direction, 0),
        "predicted_ratio": predicted[DIRECTIONS.index(direction)],
        "ratio": None,
        "slowest_rank": None,
    }
    if "unsharded" in times and None not in ranks:
        whole = times["unsharded"]
        found["ratio"] = sum(x for x in ranks if x is not None) / whole
        found["slowest_rank"] = max(x for x in ranks if x is not None) * settings.ranks / whole
    return {direction: found}


def steps(settings: Settings, tools: Tools) -> list[Step]:
    """The errors, then both directions, on one ring that the first step makes."""
    make = torch.no_grad()(cache(partial(_prepared, settings, tools)))
    return [
        Step("errors", "errors", torch.no_grad()(lambda: errors(make()))),
        *(Step("directions", x, partial(measure_direction, make, x, settings, tools)) for x in DIRECTIONS),
    ]


def table(record: Record) -> Table:
    rows = []
    for direction in (x for x in DIRECTIONS if x in record["directions"]):
        found = record["directions"][direction]
        times, num = found["ms"], record["settings"]["ranks"]
        ranks = [times[f"rank {i}"] for i in range(num) if f"rank {i}" in times]
        spread = f"{min(ranks):.3f} to {max(ranks):.3f}" if ranks else "-"
        unsharded, predicted = f"{times.get('unsharded', 0):.3f}", f"{found['predicted_ratio']:.3f}"
        rows.append((direction, unsharded, spread, f"{sum(ranks):.3f}", number(found["ratio"], ".3f"), predicted))
    columns = ("", "unsharded, ms", "a rank, ms", "sum over ranks, ms", "sum / unsharded", "predicted")
    return Table(f"Context parallelism on one card, goal {record['goal']}", columns, tuple(rows))


def failures(record: Record) -> list[CellFailure]:
    """Failed calls; on a GPU also a direction whose cost is above the goal or unknown."""
    found = [
        CellFailure(direction, name, text)
        for direction, one in record["directions"].items()
        for name, text in one["errors"].items()
    ]
    if record["is_dry_run"]:
        return found
    ratios = {direction: record["directions"].get(direction, {}).get("ratio") for direction in DIRECTIONS}
    return found + [
        CellFailure(direction, "sum / unsharded", f"{number(ratio, '.3f')}, goal {record['goal']}")
        for direction, ratio in ratios.items()
        if ratio is None or ratio > record["goal"]
    ]


STUDY = Study(
    name="context-parallel",
    help=f"all ranks on one card; about {EXPECTED_SECONDS} s on an H200",
    examples=("--seqlen 65536 --ranks 8 --out context-parallel.json", "--dry-run  # small shapes on the CPU"),
    settings=Settings,
    check=Settings.check,
    parts=lambda settings, tools: {"goal": GOAL, "errors": {}, "directions": {}},
    steps=steps,
    tables=lambda record: [table(record)],
    failures=failures,
    has_own_file=True,
    small=DRY_SETTINGS,
)
