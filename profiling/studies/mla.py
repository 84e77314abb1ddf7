"""MLA decoding beside other libraries: device time of `attn_decode(value_dim=512)` over rows of 576 numbers.

    cells   one token for each sequence over a full contiguous cache, beside the family sm80, FlashAttention-3 (`q_v`,
            automatic splits) and FlashMLA, if it is installed
    tokens  the same with two tokens
    pages   pages of 64 rows and of one row, beside the contiguous cache and the peers
    lists   a list of 2048 of 65,536 rows for each query, beside a contiguous cache of these rows
    fp8     an FP8 cache with one scale, beside the bf16 cache
    host    time of warm calls in an asynchronous loop

Every result is first compared with fp64, in all sequences. Then all calls of a cell are timed in CUDA graphs,
interleaved. Caches that fit in L2 stay there between calls, for all libraries, as in `profiling decode`. A call
without a kernel has no time; the notes below the tables have the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from cute_flash.errors import UnsupportedError
from cute_flash.planning.launch import LaunchKey
from profiling.measure.launches import needed_kernels
from profiling.measure.options import MS, ROUNDS, SEED, add_jobs, add_options, add_out, flag, option
from profiling.measure.study import CellFailure, Record, Step, Study, Tools
from profiling.measure.tables import Table, geometric_mean, number
from profiling.measure.timing import TimedCall, attempt_each
from profiling.studies import decode, mla_cases
from profiling.studies.decode_cases import Call
from profiling.studies.mla_cases import (
    APPENDED,
    CELLS,
    CONTIGUOUS,
    FA3,
    FLASH_MLA,
    FP8_CACHE,
    LISTS,
    OURS,
    PAGES,
    PARTS,
    PEERS,
    SM80,
    TOKENS,
    Case,
)

# (batch, keys) of the contiguous caches; pages have the last two.
SHAPES = ((1, 8192), (8, 8192), (32, 4096), (128, 4096))
# Calls of a note that are named; the result file has all.
MAX_NAMES = 4
METHOD = {
    "time": "device time: replays of CUDA graphs between events, median of interleaved rounds",
    "bytes": "the rows of the cache that the queries see, once",
    "flops": "2 B H T keys (576 + 512), also above the causal diagonal",
    "check": f"all sequences against fp64, the largest relative Frobenius norm of one, at most {decode.MAX_ERROR}; "
    "new memory holds NaN",
    "l2": "not flushed: back-to-back calls on the same cache; see exceeds_l2 of each cell",
    "caches": "full; pages and lists in random order; fa3 gets no lengths, which saves it a kernel",
    "host": f"median of {decode.HOST_LOOPS} asynchronous loops of {decode.HOST_CALLS} calls, interleaved in shuffled "
    "order",
}


@dataclass(frozen=True)
class Settings:
    parts: tuple[str, ...] = option(PARTS, "with --mla", choices=PARTS)
    heads: tuple[int, ...] = option((16, 64, 128), "with --mla: numbers of query heads")
    rounds: int = ROUNDS(5)
    ms: float = MS(10.0)
    seed: int = SEED(0)
    shapes: tuple[tuple[int, int], ...] = SHAPES
    paged_shapes: tuple[tuple[int, int], ...] = SHAPES[2:]
    page_sizes: tuple[int, ...] = (64, 1)
    tokens: int = 2
    lists: tuple[int, int, int] = (32, 2048, 65536)  # batch, rows of a list, rows of a sequence
    # Heads of the parts; `heads` chooses among them.
    part_heads: tuple[tuple[str, tuple[int, ...]], ...] = (
        (TOKENS, (16, 64)),
        (PAGES, (16, 128)),
        (LISTS, (16, 128)),
        (FP8_CACHE, (16,)),
    )
    host: tuple[int, int] = (1, 1024)

    def cases(self) -> list[Case]:
        heads_of = {part: [n for n in self.heads if n in heads] for part, heads in self.part_heads}
        batch, length, cached = self.lists
        made = {
            CELLS: [Case(part=CELLS, heads=n, batch=b, length=s) for n in self.heads for b, s in self.shapes],
            TOKENS: [
                Case(part=TOKENS, heads=n, batch=b, length=s, tokens=self.tokens)
                for n in heads_of[TOKENS]
                for b, s in self.shapes
            ],
            PAGES: [
                Case(part=PAGES, heads=n, batch=b, length=s, page_size=size)
                for size in self.page_sizes
                for n in heads_of[PAGES]
                for b, s in self.paged_shapes
            ],
            LISTS: [
                Case(part=LISTS, heads=n, batch=batch, length=length, page_size=1, cached=cached)
                for n in heads_of[LISTS]
            ],
            FP8_CACHE: [
                Case(part=FP8_CACHE, heads=n, batch=b, length=s) for n in heads_of[FP8_CACHE] for b, s in self.shapes
            ],
        }
        return [case for part in PARTS if part in self.parts for case in made[part]]

    def host_case(self) -> Case:
        return Case(part=CELLS, heads=min(self.heads), batch=self.host[0], length=self.host[1])


def check(settings: Settings) -> None:
    if not settings.cases():
        heads = ",".join(map(str, settings.heads))
        raise ValueError(f"--parts {','.join(settings.parts)} --heads {heads}: no cell has these heads")


def kernels(settings: Settings, tools: Tools) -> list[LaunchKey]:
    def timed_calls() -> Iterator[TimedCall]:
        # A generator, so that the tensors of one case are freed before the next.
        for case in settings.cases():
            made = mla_cases.calls(case, tools.device, settings.seed)
            yield from (TimedCall(call.call, call.context) for name, call in made.items() if name not in PEERS)
        host = mla_cases.host_calls(settings.host_case(), tools.device, settings.seed)
        yield from (TimedCall(call.call, call.context) for name, call in host.items() if name not in PEERS)

    return needed_kernels(timed_calls())


# ---- measurements
# -------------------------------------------------------------------------------------------------------


def error_of(call: Call, batch: int) -> float | None:
    """The largest relative error of a sequence against fp64; None if an element is not finite."""
    out = decode.checked_output(call)
    if out is None:
        return None
    norm = torch.linalg.vector_norm
    exact = (call.exact(i, 0) for i in range(batch))
    errors = [norm(row.double() - right) / norm(right) for row, right in zip(out, exact, strict=True)]
    return float(torch.stack(errors).max())


def no_kernel(call: Call) -> str | None:
    """Why cute_flash has no kernel for a call, or None. Makes the call once, which compiles and loads kernels."""
    try:
        with call.context():
            call.call()
    except UnsupportedError as error:
        return str(error)
    return None


def supported(made: Mapping[str, Call], tools: Tools) -> tuple[dict[str, Call], Record]:
    """The available calls with a kernel; the reasons why others have none, and the failures of others."""
    missing = mla_cases.unavailable()
    reasons, failures = attempt_each(
        {name: partial(no_kernel, call) for name, call in made.items() if name not in missing}, tools.timer
    )
    usable = {name: made[name] for name, reason in reasons.items() if reason is None}
    return usable, {"unsupported": {name: text for name, text in reasons.items() if text}, "failures": failures}


@torch.no_grad()
def measure_case(case: Case, settings: Settings, tools: Tools) -> Record:
    usable, others = supported(mla_cases.calls(case, tools.device, settings.seed), tools)
    bytes_of = {name: case.cache_bytes(name) for name in usable}
    error = partial(error_of, batch=case.batch)
    timed = decode.check_and_time(usable, error, bytes_of, tools, settings.rounds, settings.ms)
    timed["sides"] = {name: {**x, "tflops": case.flops / x["us"] / 1e6} for name, x in timed["sides"].items()}
    size, l2_bytes = case.cache_bytes(OURS), tools.facts().get("l2_bytes")
    return {
        **asdict(case),
        "cache": case.cache,
        "title": case.id,
        "bytes": size,
        "flops": case.flops,
        "exceeds_l2": None if l2_bytes is None else size > l2_bytes,
        **timed,
        **others,
        "failures": others["failures"] | timed["failures"],
    }


@torch.no_grad()
def measure_host(settings: Settings, tools: Tools) -> Record:
    """Host time of a call on a short cache: cute_flash, also with an append, and its peers."""
    usable, others = supported(mla_cases.host_calls(settings.host_case(), tools.device, settings.seed), tools)
    times = decode.time_host(usable, settings.seed, tools)
    return {"case": settings.host_case().id, **others, **times, "failures": others["failures"] | times["failures"]}


def steps(settings: Settings, tools: Tools) -> list[Step]:
    cells = [Step("cells", case.id, partial(measure_case, case, settings, tools)) for case in settings.cases()]
    return [*cells, Step("host", "host", partial(measure_host, settings, tools))]


# ---- report
# -------------------------------------------------------------------------------------------------------


def speed_over(cell: Record, name: str) -> float | None:
    """The time of another call of the cell over that of cute_flash; None if one is missing or wrong."""
    us = {key: one["us"] for key, one in cell["sides"].items() if key not in cell["wrong"]}
    return us[name] / us[OURS] if name in us and OURS in us else None


def _speeds(cells: list[Record], name: str) -> list[float]:
    return [ratio for ratio in (speed_over(cell, name) for cell in cells) if ratio is not None]


def _text(cell: Record, name: str) -> str:
    one = cell["sides"].get(name)
    mark = " wrong" if name in cell["wrong"] else ""
    return "-" if one is None else f"{one['us']:.1f}, {one['tbps']:.2f}, {one['tflops']:.0f}{mark}"


def _place(cell: Record) -> tuple[str, ...]:
    return tuple(str(cell[name]) for name in ("heads", "tokens", "batch", "length"))


PLACE = ("heads", "T", "B", "keys")


def cell_table(record: Record) -> Table:
    names = (OURS, SM80, *PEERS)
    rows = [
        (*_place(cell), *(_text(cell, name) for name in names), number(speed_over(cell, FA3)))
        for cell in record["cells"]
        if cell["part"] in (CELLS, TOKENS)
    ]
    columns = (*PLACE, *(f"{name}: µs, TB/s, TFLOP/s" for name in names), f"over {FA3}")
    return Table("MLA decoding over a contiguous cache", columns, tuple(rows))


def cache_table(record: Record) -> Table:
    names = (OURS, CONTIGUOUS, *PEERS)
    rows = [
        (
            cell["cache"],
            *_place(cell),
            *(_text(cell, name) for name in names),
            number(speed_over(cell, FA3)),
            number(speed_over(cell, CONTIGUOUS)),
        )
        for cell in record["cells"]
        if cell["part"] in (PAGES, LISTS, FP8_CACHE)
    ]
    heads = (f"{name}: µs, TB/s, TFLOP/s" for name in names)
    return Table("Other caches", ("cache", *PLACE, *heads, f"over {FA3}", f"over {CONTIGUOUS}"), tuple(rows))


def mean_table(record: Record) -> Table:
    """Geometric means by group of cells. `number`: "10 of 12" if two cells have no ratio to FlashAttention-3."""
    groups: dict[str, list[Record]] = {}
    plain = [cell for cell in record["cells"] if cell["part"] == CELLS]
    for cell in plain:
        groups.setdefault(f"{cell['heads']} heads", []).append(cell)
    groups["one token, contiguous"] = plain
    for cell in record["cells"]:
        if cell["part"] != CELLS:
            name = f"{cell['tokens']} tokens" if cell["part"] == TOKENS else cell["cache"]
            groups.setdefault(name, []).append(cell)
    rows = []
    for name, cells in groups.items():
        over_fa3 = _speeds(cells, FA3)
        means = [number(geometric_mean(_speeds(cells, other))) for other in (FLASH_MLA, SM80, CONTIGUOUS)]
        lowest = number(min(over_fa3, default=None))
        missing = len(over_fa3) not in (0, len(cells))
        size = f"{len(over_fa3)} of {len(cells)}" if missing else str(len(cells))
        rows.append((name, size, number(geometric_mean(over_fa3)), lowest, *means))
    columns = ("cells", "number", f"over {FA3}", "lowest", *(f"over {name}" for name in (FLASH_MLA, SM80, CONTIGUOUS)))
    return Table("Speed of cute_flash: geometric means", columns, tuple(rows))


def tables(record: Record) -> list[Table]:
    return [cell_table(record), cache_table(record), mean_table(record), decode.host_table(record)]


def notes(record: Record) -> list[str]:
    """Why calls have no kernel, each reason once, and the cells whose cache fits in L2."""
    calls: dict[str, list[str]] = {}
    for cell in [*record["cells"], {"title": "host", **record["host"]}]:
        for name, reason in cell["unsupported"].items():
            calls.setdefault(reason, []).append(f"{name} ({cell['title']})")
    lines = []
    for reason, names in calls.items():
        others = f" and {len(names) - MAX_NAMES} others" if len(names) > MAX_NAMES else ""
        lines.append(f"No kernel for {'; '.join(names[:MAX_NAMES])}{others}: {reason}")
    small = [cell["title"] for cell in record["cells"] if cell["exceeds_l2"] is False]
    return lines + ([f"The cache fits in L2: {'; '.join(small)}"] if small else [])


def failures(record: Record) -> list[CellFailure]:
    return decode.failures_of(record["cells"], lambda cell: cell["title"], record["host"])


SMALL = Settings(
    heads=(4,),
    rounds=1,
    ms=1.0,
    shapes=((2, 64),),
    paged_shapes=((2, 64),),
    lists=(2, 16, 64),
    part_heads=tuple((part, (4,)) for part in PARTS[1:]),
    host=(1, 64),
)
STUDY = Study(
    name="decode-mla",
    help="",
    examples=(),
    settings=Settings,
    check=check,
    kernels=kernels,
    method=METHOD,
    parts=lambda settings, tools: {
        "unavailable": mla_cases.unavailable(),
        "cells": [],
        "host": {"us": {}, "unsupported": {}, "failures": {}},
    },
    steps=steps,
    tables=tables,
    failures=failures,
    notes=notes,
    ours=(OURS, SM80, CONTIGUOUS, APPENDED),
    has_own_file=True,
    small=SMALL,
)


# ---- the command: `profiling decode`, with --mla this study
# -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mla", action="store_true", help="decoding over one latent cache (MLA); about a minute")
    add_options(parser, Settings)
    add_jobs(parser)
    add_out(parser, f"write all results as JSON (default with --mla: results/<gpu>/<date>-{STUDY.name}.json)")
    parser.add_argument("--dry-run", action="store_true", help="with --mla: small shapes on the CPU")


def run(args: argparse.Namespace) -> int:
    if args.mla:
        return STUDY.run(args)
    wrong = [flag(name) for name in ("parts", "heads") if hasattr(args, name)] + ["--dry-run"] * args.dry_run
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: only with --mla")
    return decode.STUDY.run(args)


COMMAND = replace(
    decode.STUDY.command,
    examples=(*decode.STUDY.examples, "--mla", "--mla --parts cells --heads 16 --rounds 3 --ms 5"),
    add_arguments=add_arguments,
    run=run,
)
