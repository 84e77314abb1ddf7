"""`python -m profiling bench`: shapes, peers, tables and the comparison with an earlier run."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from cute_flash.tools.precompile import precompile_keys
from cute_flash.tools.progress import steps
from profiling.bench import compare, fa4_cache, report
from profiling.bench.bench import Settings, run_bench
from profiling.bench.suites import SUITES
from profiling.measure.launches import needed_kernels
from profiling.measure.options import add_jobs, add_options, add_out, int_list, name_list, settings_of
from profiling.measure.record import Run, load, save
from profiling.measure.shapes import DTYPES, MASKS, Shape
from profiling.measure.study import FAILED, NOT_MEASURED, OK, Command, Tools
from profiling.measure.tables import print_lines, print_unavailable, show
from profiling.measure.timing import EventTimer, GraphTimer
from profiling.peers.directions import calls_of
from profiling.peers.registry import BY_NAME_ONLY, DEFAULT_NAMES, select, split_available

OF_SUITE = "default: those of the suite"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = f"default: {','.join(DEFAULT_NAMES)}; also {','.join(BY_NAME_ONLY)}"
    add("--providers", type=name_list, default=DEFAULT_NAMES, metavar="LIST", help=names)
    add_options(parser, Settings)
    add("--head-dims", type=int_list, metavar="LIST", help=OF_SUITE)
    add("--masks", type=name_list, metavar="LIST", help=f"of {', '.join(MASKS)}; {OF_SUITE}")
    add("--lengths", type=int_list, metavar="LIST", help=OF_SUITE)
    add("--batch", type=int, metavar="N", help="default: tokens of the suite / length")
    add("--heads", type=int, metavar="N", help="query heads (default: hidden size of the suite / head dim)")
    add_jobs(parser)
    add_out(parser)
    add("--base", type=Path, metavar="FILE", help="compare with the JSON of an earlier run")
    text = "relative fall of ours/ref that is a regression (default: %(default)s)"
    add("--threshold", type=float, default=0.05, metavar="X", help=text)


def _show_run(run: Run) -> None:
    tables = [*report.cell_tables(run), report.summary_table(run), report.accuracy_table(run)]
    show([table for table in tables if table is not None])
    print(f"{report.LEGEND}\n")
    print_lines("Notes", report.notes(run))
    print_lines("Failures", report.failures(run))


def _compare(run: Run, base: Run, threshold: float) -> bool:
    """Print the changes; true if one is a regression, or if no cell can be compared."""
    changes = compare.changes(run, base)
    if not changes:
        print(f"No cell of the base can be compared: none has a ratio to {run.reference}.")
        return True
    show([report.change_table(changes, threshold)])
    return bool(compare.regressions(changes, threshold))


def _shapes(suite: str, args: argparse.Namespace) -> list[Shape]:
    return SUITES[suite].narrowed(args.lengths, args.head_dims, args.masks, args.batch, args.heads).shapes()


def run(args: argparse.Namespace) -> int:
    settings, base = settings_of(Settings, args), load(args.base) if args.base else None
    shapes = _shapes(settings.suite, args)
    select([settings.reference])
    available, unavailable = split_available(select(args.providers, settings.kernels), settings.direction)
    print_unavailable(unavailable)
    if not available:
        print("Nothing was measured. `cute-flash explain` predicts the time of a call without a GPU.", file=sys.stderr)
        return NOT_MEASURED
    device = torch.device("cuda")
    calls = calls_of(available, shapes, (settings.direction,), DTYPES[settings.dtype], device, settings.layout)
    precompile_keys(needed_kernels(calls), args.jobs)
    if any(peer.name == fa4_cache.FA4 for peer in available):
        groups = fa4_cache.representatives(shapes)
        with steps("compiling FlashAttention-4", len(groups)) as done:
            fa4_cache.fill(groups, settings.direction, settings.dtype, args.jobs, done)
    with steps(f"timing {settings.direction}, suite {settings.suite}", len(shapes)) as done:
        timer = GraphTimer() if settings.graph else EventTimer()
        tools = Tools(timer, device=device, progress=done, save=partial(save, path=args.out))
        measured = run_bench(shapes, available, unavailable, settings, tools)
    _show_run(measured)
    is_worse = base is not None and _compare(measured, base, args.threshold)
    return FAILED if is_worse or report.failures(measured) else OK


COMMAND = Command(
    "bench",
    "speed and accuracy beside other libraries",
    (
        "--suite paper --out paper.json",
        "--suite paper --direction bwd --base paper-bwd.json  # exit status 1 if a cell got slower",
        "--head-dims 128 --masks causal --lengths 512,4096 --providers cute_flash,sdpa-flash,flex",
        "--batch 2 --heads 32 --lengths 8192 --head-dims 128 --masks causal  # one shape",
    ),
    add_arguments,
    run,
)
