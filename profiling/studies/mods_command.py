"""`python -m profiling mods`: its options, one process for all cells or one for each, and the tables."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cute_flash.tools.progress import steps
from profiling.counters.ncu import run_command
from profiling.measure.options import name_list, settings_of
from profiling.measure.study import Command, need_gpu
from profiling.measure.tables import print_unavailable
from profiling.studies import features, mods, mods_processes, mods_summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    features.add_arguments(parser, mods.KINDS)
    add("--functions", type=name_list, default=(), metavar="LIST", help=f"default: {','.join(mods.FUNCTIONS)}")
    add("--peers", type=name_list, default=(), metavar="LIST", help=f"default: {','.join(mods.PEERS)}")
    add("--parallel", action="store_true", help="compile in a process for each function and head dim")


def _run_in_processes(args: argparse.Namespace, settings: features.Settings, folder: Path) -> list[Path]:
    chosen = list(mods_processes.choices(args.kinds, settings.head_dims, settings.functions or mods.FUNCTIONS))
    values = {"kernels": args.kernels, "rounds": settings.rounds, "ms": settings.ms, "seed": settings.seed}
    common = [f"--{name}={x}" for name, x in values.items()]
    common += [f"--peers={','.join(settings.peers)}"] * bool(settings.peers)

    def run_process(arguments: Sequence[str]) -> tuple[int, str]:
        return run_command([sys.executable, "-m", "profiling", *arguments], mods_processes.LIMIT_S)

    with steps("measuring mods", len(chosen)) as done:
        return mods_processes.run(common, chosen, folder, run_process, done)


def run(args: argparse.Namespace) -> int:
    settings = replace(settings_of(features.Settings, args), functions=args.functions, peers=args.peers)
    if args.parallel and not args.parts:
        need_gpu()
        with tempfile.TemporaryDirectory() as folder:
            args.parts = _run_in_processes(args, settings, Path(folder))
            results = features.merge_parts(args, mods.KINDS)
    elif args.parts:
        results = features.merge_parts(args, mods.KINDS)
    else:
        need_gpu()
        print_unavailable(mods.unavailable(settings))
        results = features.measure_kinds(args, settings, mods.KINDS)
    return features.report(results, [mods_summary.summary(results)])


COMMAND = Command(
    "mods",
    "score_mod, mask_mod, block masks and biases beside FlexAttention and FlashAttention-4",
    ("--functions alibi,causal --peers flex",),
    add_arguments,
    run,
)
