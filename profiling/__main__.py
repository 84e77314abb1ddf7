"""The command `python -m profiling`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cute_flash.jit.compile import precompile_all
from cute_flash.spec import arch
from cute_flash.spec.arch import ArchSpec
from cute_flash.tools.cli import HELP_FORMATTER, add_command
from cute_flash.tools.precompile import precompile_keys
from cute_flash.tools.progress import steps
from profiling.bench import compare, fa4_cache, report
from profiling.bench.bench import Settings, Tools, needed_kernels, run_bench
from profiling.bench.suites import SUITES
from profiling.counters import ncu, ncu_case, ncu_report, ncu_run, ncu_source, sanitize, sanitize_case
from profiling.counters.expect import expected
from profiling.documents import every_run
from profiling.measure import machine
from profiling.measure.arguments import at_least_one, int_list, name_list, num_cores
from profiling.measure.gpu_lock import GpuLock
from profiling.measure.record import Run, load, save, write_json
from profiling.measure.shapes import DTYPES, MASKS, Shape
from profiling.measure.tables import Table, print_lines, print_unavailable, show
from profiling.measure.timing import EventTimer, GraphTimer
from profiling.measure.workers import Pool
from profiling.peers.cute_flash import CuteFlash
from profiling.peers.directions import DIRECTIONS
from profiling.peers.peer import KERNELS, LAYOUTS, Peer
from profiling.peers.registry import BY_NAME_ONLY, DEFAULT_NAMES, select, split_available
from profiling.studies import commands as studies
from profiling.studies import (
    decode,
    features,
    fp32,
    host,
    host_cases,
    host_report,
    mods,
    mods_processes,
    mods_summary,
    start,
)
from profiling.tune import ranking, tune, versions
from profiling.tune.variants import FAMILIES, Selection, choose, family_of

DESCRIPTION = "Measure cute_flash beside other libraries, tune its tiles, and compare counters with predictions."
# The layout of shared memory that every kernel has.
DEFAULT_LAYOUT = "swizzled"
# Exit status: 0 success, 1 a failure, a regression or a missed goal, 2 nothing was measured.
OK, FAILED, NOT_MEASURED = 0, 1, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m profiling", description=DESCRIPTION, formatter_class=HELP_FORMATTER
    )
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")

    add = partial(add_command, commands)
    bench = add(
        "bench",
        "measure speed and accuracy beside the other libraries that are installed",
        "--suite paper --out paper.json",
        "--suite paper --direction bwd --base paper-bwd.json  # exit status 1 if a cell got slower",
        "--head-dims 128 --masks causal --lengths 512,4096 --providers cute_flash,sdpa-flash,flex",
        "--batch 2 --heads 32 --lengths 8192 --head-dims 128 --masks causal  # one shape",
    )
    _add_bench(bench)
    host_command = add(
        "host", "measure the host time of calls beside SDPA and beside the bare launches", "--out host.json", "--start"
    )
    host_cases.add_arguments(host_command, KERNELS)
    _add_features(
        add("features", "measure calls with a feature beside the same calls without it", "--head-dims 128"),
        tuple(features.KINDS),
    )
    mods_command = add(
        "mods",
        "measure score_mod, mask_mod, block masks and biases beside FlexAttention and FlashAttention-4",
        "--functions alibi,causal --peers flex",
    )
    _add_features(mods_command, tuple(mods.KINDS))
    _add_mods(mods_command)
    fp32_command = add(
        "fp32",
        "measure fp32 attention beside torch's: device time, and errors against fp64",
        "--out fp32.json",
        "--head-dims 128 --masks causal --lengths 4096",
    )
    _add_fp32(fp32_command)
    decode_command = add(
        "decode",
        f"measure attn_decode beside other libraries, and its variants; about {decode.EXPECTED_SECONDS} s on an H200",
        "--out decode.json",
        "--rounds 3 --ms 5",
    )
    _add_rounds(decode_command, decode.Settings().rounds, decode.Settings().ms)
    _add_jobs(decode_command)
    tune_command = add(
        "tune",
        "compile, check, time and rank tiles of a kernel",
        "--head-dims 64,128 --lengths 512,16384 --out tune.json",
        '--tile "128: 128x{112,128,144} s2 q{1,2} c{0,1}" --masks causal',
        '--family bwd_sm80 --tile "128: 64x128 s2 p4 k{2,4} q2" --graph',
        "--compile-only --arch sm_90 --head-dims 128  # needs no GPU",
    )
    _add_tune(tune_command)
    ncu_command = add(
        "ncu",
        "profile single launches with Nsight Compute and compare the counters with predictions",
        "--out build/ncu",
        "--kernels fwd-sm80 --head-dim 96 --mask causal",
        "--predict-only --arch sm_90  # needs no GPU",
    )
    _add_ncu(ncu_command)
    sanitize_command = add(
        "sanitize",
        "run compute-sanitizer over small launches of every kind of kernel",
        "--tool racecheck --minutes 8",
        "--list  # needs no GPU",
    )
    _add_sanitize(sanitize_command)
    versions_command = add(
        "versions",
        "time versions of cute_flash beside each other, such as before and after a change",
        "before=main after=. --directions bwd --head-dims 128  # a commit and a folder",
        "a=../one b=../two --features deterministic,dropout --lengths 4096 --out versions.json",
    )
    _add_versions(versions_command)
    studies.add_commands(add)
    all_command = add(
        "all",
        "run every command whose results the README and the docs show",
        "--list  # needs no GPU",
        "--budget-s 600  # leave out runs that would not end in time; a second call resumes",
        "--only decode,mods",
    )
    _add_all(all_command)
    plots = add("plots", "draw the figures and fill in the tables of the documents; needs no GPU", "")
    plots.add_argument(
        "--out", type=Path, default=machine.PLOTS, metavar="DIR", help="draw the figures into DIR and write no tables"
    )
    return parser


def _add_rounds(parser: argparse.ArgumentParser, rounds: int, ms: float) -> None:
    add = parser.add_argument
    add(
        "--rounds",
        type=at_least_one,
        default=rounds,
        metavar="N",
        help="rounds; a result is their median (default: %(default)s)",
    )
    add("--ms", type=float, default=ms, help="back-to-back calls in a round, in ms (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the inputs (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="write all results as JSON, after each cell")


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    text = "compiling processes (default: cores)"
    parser.add_argument("--jobs", type=at_least_one, default=num_cores(), metavar="N", help=text)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add, suite = parser.add_argument, "default: those of the suite"
    add(
        "--providers",
        type=name_list,
        default=DEFAULT_NAMES,
        metavar="LIST",
        help=f"default: {','.join(DEFAULT_NAMES)}; also {','.join(BY_NAME_ONLY)}",
    )
    add("--kernels", choices=KERNELS, default="auto", help="kernel family of cute_flash (default: %(default)s)")
    add("--suite", choices=SUITES, default="quick", help="shapes (default: %(default)s)")
    add("--direction", choices=DIRECTIONS, default="fwd", help="forward or backward pass (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    add("--head-dims", type=int_list, metavar="LIST", help=suite)
    add("--masks", type=name_list, metavar="LIST", help=f"of {', '.join(MASKS)}; {suite}")
    add("--lengths", type=int_list, metavar="LIST", help=suite)
    add("--batch", type=int, metavar="N", help="default: tokens of the suite / length")
    add("--heads", type=int, metavar="N", help="query heads (default: hidden size of the suite / head dim)")
    _add_rounds(parser, rounds=6, ms=25.0)
    _add_jobs(parser)
    add("--graph", action="store_true", help="time replays of CUDA graphs, without host time")
    add("--outliers", action="store_true", help="check the accuracy on inputs with outliers too")
    add("--layout", choices=LAYOUTS, default="bhsd", help="order of the inputs in memory (default: %(default)s)")
    add("--reference", default="sdpa-flash", metavar="NAME", help="peer of the column ours/ref (default: %(default)s)")
    add("--base", type=Path, metavar="FILE", help="compare with the JSON of an earlier run")
    add(
        "--threshold",
        type=float,
        default=0.05,
        metavar="X",
        help="relative fall of ours/ref that is a regression (default: %(default)s)",
    )


def _add_features(parser: argparse.ArgumentParser, kinds: tuple[str, ...]) -> None:
    defaults, add = features.Settings(), parser.add_argument
    add("--kinds", type=name_list, default=kinds, metavar="LIST", help=f"default: {','.join(kinds)}")
    add("--kernels", choices=KERNELS, default="auto", help="kernel family of cute_flash (default: %(default)s)")
    dims = ",".join(map(str, defaults.head_dims))
    add("--head-dims", type=int_list, default=defaults.head_dims, metavar="LIST", help=f"default: {dims}")
    _add_rounds(parser, defaults.rounds, defaults.ms)
    _add_jobs(parser)
    add("--lock", type=Path, metavar="FILE", help="processes with the same FILE measure one after another")
    add(
        "--parts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="only merge the JSON files of runs that shared a --lock; needs no GPU",
    )


def _add_mods(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--functions", type=name_list, default=(), metavar="LIST", help=f"default: {','.join(mods.FUNCTIONS)}")
    add("--peers", type=name_list, default=(), metavar="LIST", help=f"default: {','.join(mods.PEERS)}")
    add("--parallel", action="store_true", help="compile in a process for each function and head dim")


def _add_versions(parser: argparse.ArgumentParser) -> None:
    defaults, add = versions.Settings(), parser.add_argument
    text = "a folder with a checkout, or a commit; the first is the base"
    add("versions", nargs="+", metavar="NAME=VERSION", help=text)
    text = f"of {', '.join(features.OPTIONS)} (default: {','.join(defaults.features)})"
    add("--features", type=name_list, default=defaults.features, metavar="LIST", help=text)
    for name in ("directions", "masks", "head_dims", "lengths"):
        value = getattr(defaults, name)
        argument_type = int_list if name in ("head_dims", "lengths") else name_list
        text = f"default: {','.join(map(str, value))}"
        add(f"--{name.replace('_', '-')}", type=argument_type, default=value, metavar="LIST", help=text)
    for name in ("tokens", "hidden"):
        add(f"--{name}", type=at_least_one, default=getattr(defaults, name), metavar="N", help="default: %(default)s")
    _add_rounds(parser, defaults.rounds, defaults.ms)
    _add_jobs(parser)


def _add_fp32(parser: argparse.ArgumentParser) -> None:
    defaults, add = fp32.Settings(), parser.add_argument
    for name, kind in (("head_dims", int_list), ("masks", name_list), ("lengths", int_list)):
        value = getattr(defaults, name)
        text = f"default: {','.join(map(str, value))}"
        add(f"--{name.replace('_', '-')}", type=kind, default=value, metavar="LIST", help=text)
    _add_rounds(parser, defaults.rounds, defaults.ms)
    _add_jobs(parser)


def _add_ncu(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kernels = tuple(ncu_case.LAYOUTS)
    add("--kernels", type=name_list, default=kernels, metavar="LIST", help=f"default: {','.join(kernels)}")
    add("--variants", type=name_list, default=(), metavar="LIST", help="layouts, such as swizzled,plain (default: all)")
    ncu_case.add_shape(parser)
    sizes = ", ".join(f"{name} {value}" for name, value in ncu_case.BEYOND_L2.items())
    add("--beyond-l2", action="store_true", help=f"a shape whose tensors exceed L2: {sizes}, default layouts")
    add("--by-instruction", action="store_true", help="count shared-memory wavefronts by SASS instruction instead")
    add("--out", type=Path, default=Path("build/ncu"), metavar="DIR", help="folder of reports (default: %(default)s)")
    add("--ncu", default="ncu", metavar="PROGRAM", help="path of Nsight Compute (default: %(default)s)")
    _add_jobs(parser)
    add("--predict-only", action="store_true", help="print the predictions; needs no GPU")
    add("--from-exports", action="store_true", help="write ncu.json again from the .csv files in DIR; needs no GPU")
    add("--arch", metavar="sm_xx", help="architecture of --predict-only (default: the GPU here)")


def _add_all(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", type=name_list, default=(), metavar="LIST", help="names of runs (default: all)")
    add("--list", action="store_true", help="print the runs and their commands; needs no GPU")
    add("--budget-s", type=float, metavar="SECONDS", help="start no run that would not end within this time")
    add("--out", type=Path, metavar="DIR", help="default: profiling/results/<gpu>")


def _add_sanitize(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tool", dest="tools", action="append", choices=sanitize.TOOLS, help="default: all; may be repeated")
    add("--minutes", type=float, default=20.0, metavar="N", help="stop after N minutes (default: %(default)s)")
    add("--only", default="*", metavar="PATTERN", help="names with * such as 'sm90-*-dropout', or a part of names")
    add("--list", action="store_true", help="print the launches and the expected time; needs no GPU")
    add("--processes", type=at_least_one, default=4, metavar="N", help="sanitizers at once (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="default: profiling/results/<gpu>/<date>-sanitize.txt")
    _add_jobs(parser)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--family", choices=FAMILIES, default="fwd_sm90", help="kernel (default: %(default)s)")
    add(
        "--tile",
        "--tiles",
        dest="tiles",
        action="append",
        default=[],
        metavar="EXPR|FILE",
        help='variants, such as "64: 192x{112,128} s{2,4} q2" (default: neighbours of the tile table\'s rows)',
    )
    add("--max-variants", type=at_least_one, default=30, metavar="N", help="per head dim (default: %(default)s)")
    add("--head-dims", type=int_list, metavar="LIST", help="default: those of the variants, or of the kernel")
    add("--masks", type=name_list, default=MASKS, metavar="LIST", help=f"default: {','.join(MASKS)}")
    add("--lengths", type=int_list, metavar="LIST", help="default: those of the quick suite")
    add("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    peers = ("sdpa-flash",)
    add(
        "--peers",
        type=name_list,
        default=peers,
        metavar="LIST",
        help="the first is the reference (default: sdpa-flash)",
    )
    _add_rounds(parser, rounds=5, ms=25.0)
    add("--graph", action="store_true", help="time replays of CUDA graphs, without host time")
    _add_jobs(parser)
    add("--resources", action="store_true", help="report registers and spills too, by a second compilation")
    add("--compile-only", action="store_true", help="report registers, spills and shared memory; needs no GPU")
    add("--arch", metavar="sm_xx", help="architecture of --compile-only (default: the GPU here)")
    add("--kernel-cache", type=Path, metavar="DIR", help="keep compiled kernels in DIR for later runs")


def _available(args: argparse.Namespace, direction: str) -> tuple[list[Peer], dict[str, str]]:
    available, unavailable = split_available(select(args.providers, args.kernels), direction)
    print_unavailable(unavailable)
    return available, unavailable


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


def _shapes(args: argparse.Namespace) -> list[Shape]:
    return SUITES[args.suite].narrowed(args.lengths, args.head_dims, args.masks, args.batch, args.heads).shapes()


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(**{f.name: getattr(args, f.name) for f in fields(Settings) if hasattr(args, f.name)})


def _bench(args: argparse.Namespace) -> int:
    shapes, base = _shapes(args), load(args.base) if args.base else None
    select([args.reference])
    available, unavailable = _available(args, args.direction)
    if not available:
        print("Nothing was measured. `cute-flash explain` predicts the time of a call without a GPU.", file=sys.stderr)
        return NOT_MEASURED
    save_run: Callable[[Run], None] = partial(save, path=args.out) if args.out else lambda run: None
    device, settings = torch.device("cuda"), _settings(args)
    precompile_keys(needed_kernels(shapes, available, settings, device), args.jobs)
    if any(peer.name == fa4_cache.FA4 for peer in available):
        groups = fa4_cache.representatives(shapes)
        with steps("compiling FlashAttention-4", len(groups)) as done:
            fa4_cache.fill(groups, args.direction, args.dtype, args.jobs, done)
    with steps(f"timing {args.direction}, suite {args.suite}", len(shapes)) as done:
        tools = Tools(
            timer=GraphTimer() if args.graph else EventTimer(),
            device=device,
            facts=machine.facts,
            card_state=machine.card_state,
            progress=done,
            save=save_run,
        )
        run = run_bench(shapes, available, unavailable, settings, tools)
    _show_run(run)
    is_worse = base is not None and _compare(run, base, args.threshold)
    return FAILED if is_worse or report.failures(run) else OK


def _host(args: argparse.Namespace) -> int:
    settings = host_cases.Settings.of(args)
    # Raises for an unknown case, before anything is measured.
    settings.chosen()
    base: dict[str, Any] = json.loads(args.base.read_text()) if args.base else {}
    if not arch.has_gpu():
        raise ValueError("no CUDA device: nothing can be measured")
    environment = {} if args.kernels == "auto" else {"CUTE_FLASH_KERNELS": args.kernels}
    with steps("measuring host time", 1 + args.processes + args.start) as done:
        run = host.fresh_process(environment)
        data = host.run_host(settings, run, lambda keys: list(precompile_all(keys, args.jobs)), done, base)
        starts = start.start_times("cuda", args.kernels) if args.start else {}
        if args.start:
            done("start")
    data.update(machine=machine.facts(), kernels=args.kernels, start=starts)
    if "error" in starts:
        data["errors"]["start"] = starts["error"]
    if args.out:
        write_json(data, args.out)
    show([*host_report.host_tables(data), *([start.start_table(starts)] if "cold" in starts else [])])
    print_lines("Failures", [f"{name}: {error}" for name, error in data["errors"].items()])
    return FAILED if host_report.has_failed(data) else OK


def _features(args: argparse.Namespace) -> int:
    if args.parts:
        return _merge_features(args)
    if not arch.has_gpu():
        raise ValueError("no CUDA device: nothing can be measured")
    if getattr(args, "parallel", False):
        return _mods_in_processes(args)
    names = {f.name for f in fields(features.Settings)} & set(vars(args))
    settings = features.Settings(**{name: getattr(args, name) for name in names})
    context, is_mods = CuteFlash(kernels=args.kernels).context(), args.command == "mods"
    lock = GpuLock(args.lock) if args.lock else None
    print_unavailable(mods.unavailable(settings) if is_mods else {})
    facts = machine.facts()

    def save_results(results: Sequence[features.CellResult]) -> None:
        if args.out:
            write_json(features.to_dict(results, settings, facts), args.out)

    cells, timer, device = mods.KINDS if is_mods else features.KINDS, GraphTimer(), torch.device("cuda")
    with context:
        chosen = features.cells_of(args.kinds, settings, device, cells)
        precompile_keys(features.needed_kernels(chosen), args.jobs)
        with steps(f"timing {args.command}", len(args.kinds) * 2 * len(settings.head_dims)) as done:
            results = features.run_features(args.kinds, settings, timer, device, done, cells, lock, save_results)
    return _show_features(results, [mods_summary.summary(results)] if is_mods else [])


def _show_features(results: Sequence[features.CellResult], summaries: Sequence[Table]) -> int:
    show([*features.tables(results), *summaries])
    errors = [f"{one.name}, {name}: {text}" for one in results for name, text in one.errors.items()]
    print_lines("Failures", errors)
    return FAILED if errors else OK


def _fp32(args: argparse.Namespace) -> int:
    settings = fp32.Settings(**{f.name: getattr(args, f.name) for f in fields(fp32.Settings)})
    # A wrong mask or length is refused before anything is compiled.
    shapes = settings.shapes()
    if not arch.has_gpu():
        raise ValueError("no CUDA device: nothing can be measured")
    precompile_keys(fp32.kernel_keys(settings, arch.detect(torch.cuda.current_device())), args.jobs)
    with steps("measuring fp32", len(settings.error_shapes()) + len(fp32.DIRECTIONS) * len(shapes)) as done:
        tools = fp32.Tools(
            timer=GraphTimer(),
            device=torch.device("cuda"),
            facts=machine.facts,
            card_state=machine.card_state,
            progress=done,
            save=partial(write_json, path=args.out) if args.out else lambda record: None,
        )
        record = fp32.run_fp32(settings, fp32.peers(), tools)
    show(fp32.tables(record))
    print_lines("Failures", fp32.failures(record))
    return FAILED if fp32.has_failed(record) else OK


def _decode(args: argparse.Namespace) -> int:
    settings = decode.Settings(rounds=args.rounds, ms=args.ms, seed=args.seed)
    if not arch.has_gpu():
        raise ValueError("no CUDA device: nothing can be measured")
    with steps("measuring decode", settings.num_steps) as done:
        tools = decode.Tools(
            timer=GraphTimer(),
            device=torch.device("cuda"),
            facts=machine.facts,
            card_state=machine.card_state,
            progress=done,
            save=partial(write_json, path=args.out) if args.out else lambda record: None,
        )
        precompile_keys(decode.needed_kernels(settings, tools), args.jobs)
        record = decode.run_decode(settings, tools)
    print_unavailable(record["unavailable"])
    show(decode.tables(record))
    print_lines("Failures", decode.failures(record))
    return FAILED if decode.has_failed(record) else OK


def _mods_in_processes(args: argparse.Namespace) -> int:
    chosen = list(mods_processes.choices(args.kinds, args.head_dims, args.functions or mods.FUNCTIONS))
    names = ("kernels", "rounds", "ms", "seed", *["peers"] * bool(args.peers))
    values = {name: getattr(args, name) for name in names}
    common = [f"--{name}={','.join(x) if isinstance(x, tuple) else x}" for name, x in values.items()]

    def run_process(arguments: Sequence[str]) -> tuple[int, str]:
        return ncu.run_command([sys.executable, "-m", "profiling", *arguments], mods_processes.LIMIT_S)

    with tempfile.TemporaryDirectory() as folder:
        with steps("measuring mods", len(chosen)) as done:
            args.parts = mods_processes.run(common, chosen, Path(folder), run_process, done)
        return _merge_features(args)


def _merge_features(args: argparse.Namespace) -> int:
    kinds = tuple(mods.KINDS if args.command == "mods" else features.KINDS)
    data = features.merged([json.loads(path.read_text()) for path in args.parts], kinds)
    if args.out:
        write_json(data, args.out)
    results = features.from_dict(data)
    return _show_features(results, [mods_summary.summary(results)] if args.command == "mods" else [])


def _target(args: argparse.Namespace, without_gpu: str) -> ArchSpec:
    """The architecture of the GPU here, or of --arch with the option that needs no GPU."""
    option = without_gpu.replace("_", "-")
    if args.arch and not getattr(args, without_gpu):
        raise ValueError(f"--arch {args.arch}: timed kernels run on the GPU here; use it with --{option}")
    if args.arch:
        return arch.by_name(args.arch)
    if not arch.has_gpu():
        raise ValueError(f"no CUDA device; without one: --{option} --arch sm_90")
    return arch.detect(torch.cuda.current_device())


def _tune(args: argparse.Namespace) -> int:
    target = _target(args, "compile_only")
    selection = Selection(tuple(args.tiles), args.head_dims, args.masks, args.max_variants)
    variants = choose(selection, args.family, target)
    direction = family_of(args.family).direction
    peers, unavailable = split_available([] if args.compile_only else select(args.peers), direction)
    print_unavailable(unavailable)
    if not args.compile_only and not peers:
        raise ValueError(f"--peers {','.join(args.peers)}: none of them is available, so there is no reference")
    names = {f.name for f in fields(tune.Settings)} & set(vars(args))
    settings = replace(
        tune.Settings(**{name: getattr(args, name) for name in names}),
        arch=target.name,
        peers=tuple(peer.name for peer in peers),
    )
    # Raises for a wrong mask or length, before anything is compiled.
    settings.shapes([variant.head_dim for variant in variants])

    def save_tuning(tuning: ranking.Tuning) -> None:
        if args.out:
            write_json(ranking.to_dict(tuning), args.out)

    tools = tune.Tools(
        pool=Pool,
        facts=machine.facts,
        card_state=machine.card_state,
        progress=steps,
        save=save_tuning,
        cache=args.kernel_cache,
    )
    tuning = tune.run_tune(variants, target, settings, tools, unavailable)
    show(ranking.resource_tables(tuning) if args.compile_only else ranking.speed_tables(tuning))
    print(f"{ranking.RESOURCE_LEGEND if args.compile_only else ranking.SPEED_LEGEND}\n")
    print_lines("Not ranked", tuning.complaints())
    return FAILED if tuning.complaints() else OK


def _ncu(args: argparse.Namespace) -> int:
    if args.from_exports:
        ncu_run.export_record(args.out)
        findings, record = ncu_run.from_folder(args.out)
        write_json(record, args.out / ncu_run.RECORD)
        return _show_findings(findings)
    target, variants = _target(args, "predict_only"), args.variants
    if args.beyond_l2:
        vars(args).update(ncu_case.BEYOND_L2)
    if args.beyond_l2 or args.by_instruction:
        variants = variants or (DEFAULT_LAYOUT,)
    cases = ncu.choose(args.kernels, variants, ncu_case.shape_of(args), args.dtype)
    findings = [ncu_report.Finding(case, expected(case, target)) for case in cases]
    if not args.predict_only:
        tool = ncu.Tool(args.out, args.ncu)
        tool.check()
        keys = dict.fromkeys(key for case in cases for key in case.keys(target))
        precompile_keys(list(keys), args.jobs)
        if args.by_instruction:
            return _count_instructions(tool, cases)
        settings = {"kernels": args.kernels, "variants": variants, "jobs": args.jobs}
        facts = {"settings": settings, "machine": machine.facts(), "ncu": tool.version}
        with steps("profiling", len(findings)) as done:
            findings = ncu_run.profile_all(tool, findings, facts, done)
    return _show_findings(findings)


def _count_instructions(tool: ncu.Tool, cases: Sequence[ncu_case.Case]) -> int:
    failures = []
    for case in cases:
        try:
            show([ncu_source.table(case.id, ncu_source.collect(tool, case))])
        except ncu.NotPermittedError:
            raise
        except ncu.NcuError as error:
            failures.append(str(error))
    print_lines("Failures", failures)
    return FAILED if failures else OK


def _show_findings(findings: Sequence[ncu_report.Finding]) -> int:
    show(ncu_report.tables(findings))
    print(f"{ncu_report.LEGEND}\n")
    failures = [f"{one.case.id}: {one.error}" for one in findings if one.error]
    print_lines("Failures", failures)
    return FAILED if failures else OK


def _all(args: argparse.Namespace) -> int:
    chosen = every_run.chosen_steps(args.only)
    if args.list:
        show([every_run.list_table(chosen)])
        return OK
    if not arch.has_gpu():
        raise ValueError("no CUDA device: nothing can be measured; --list prints the commands")
    facts = machine.facts()
    example = studies.default_path("", facts)
    date = example.name[: len("2026-01-31")]
    known = {"date": date, **{name: facts[name] for name in ("git_commit", "source_digest")}}
    folder = args.out or example.parent
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = every_run.run_all(chosen, folder, known, args.budget_s)
    show([every_run.table(outcomes)])
    return OK if all(one.text in (every_run.DONE, every_run.SKIPPED) for one in outcomes) else FAILED


def _sanitize(args: argparse.Namespace) -> int:
    tools = tuple(dict.fromkeys(args.tools or sanitize.TOOLS))
    chosen = sanitize_case.launches(only=args.only)
    if not chosen:
        raise ValueError(f"--only {args.only}: no launch has such a name; --list prints all names")
    seconds = sanitize.expected_seconds(tools, len(chosen))
    if args.list:
        print("\n".join(launch.name for launch in chosen))
        print(f"{len(chosen)} launches, {', '.join(tools)}: about {seconds:.0f} s on an H200 (an estimate)")
        return OK
    if not arch.has_gpu():
        raise ValueError("no CUDA device: nothing can be checked")
    sanitize.check()
    deadline = time.monotonic() + 60 * args.minutes
    facts = machine.facts()
    out = args.out or studies.default_path("sanitize", facts).with_suffix(".txt")
    precompile_keys(sanitize_case.needed_kernels(chosen), args.jobs)
    version = machine.run_command((sanitize.PROGRAM, "--version"))
    outcomes = []
    for tool in tools:
        outcomes.append(sanitize.run_processes(tool, chosen, deadline, ncu.run_command, args.processes))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(sanitize.log(outcomes, facts, version), encoding="utf-8")
    print(out.read_text(encoding="utf-8"))
    return OK if all(outcome.is_clean for outcome in outcomes) else FAILED


def _versions(args: argparse.Namespace) -> int:
    named = [text.partition("=") for text in args.versions]
    chosen = {name: version for name, equals, version in named if name and equals and version}
    if len(chosen) < max(2, len(named)):
        raise ValueError(f"{' '.join(args.versions)}: expected at least two NAME=VERSION with different names")
    settings = versions.Settings(**{x.name: getattr(args, x.name) for x in fields(versions.Settings)})
    num_steps, facts, digests = len(chosen) + len(settings.cells()), machine.facts(), dict[str, str]()

    def save_results(results: Sequence[versions.CellResult]) -> None:
        if args.out is not None:
            write_json(versions.to_dict(results, settings, chosen, digests, facts), args.out)

    with versions.started(chosen, digests) as remotes, steps("measuring", num_steps) as done:
        results = versions.run_versions(remotes, settings, args.jobs, done, save_results)
    title = "Device time" if arch.has_gpu() else "Wall-clock time of the CPU implementation: no CUDA device"
    show(versions.tables(results, list(chosen), title))
    failures = versions.failures(results, next(iter(chosen)))
    print_lines("Failures", failures)
    return FAILED if failures else OK


def _plots(args: argparse.Namespace) -> int:
    # These modules need the checked-in results, which measuring does not.
    from profiling.documents import doc_tables, figures

    missing = figures.write(args.out)
    if args.out == machine.PLOTS:
        doc_tables.write()
    print(f"wrote {len(figures.FIGURES) - len(missing)} figures to {args.out}")
    print_lines("Not drawn", [f"{name}: no {', '.join(files)}" for name, files in missing.items()])
    return NOT_MEASURED if missing else OK


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        commands = {
            "bench": _bench,
            "host": _host,
            "features": _features,
            "fp32": _fp32,
            "decode": _decode,
            "mods": _features,
            "tune": _tune,
            "ncu": _ncu,
            "sanitize": _sanitize,
            "versions": _versions,
            "plots": _plots,
            "all": _all,
            **studies.COMMANDS,
        }
        return commands[args.command](args)
    except (ValueError, OSError) as error:
        # A wrong argument or file; these errors come before anything is measured.
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return NOT_MEASURED


if __name__ == "__main__":
    sys.exit(main())
