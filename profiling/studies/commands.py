"""The commands `standard`, `numerics`, `training` and `context-parallel` of `python -m profiling`."""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cute_flash.distributed.sharding import SHARDINGS
from cute_flash.spec import arch
from cute_flash.tools.precompile import precompile_keys
from cute_flash.tools.progress import steps
from profiling.counters import ncu
from profiling.counters.ncu_metrics import parse_raw
from profiling.measure import machine
from profiling.measure.arguments import at_least_one, int_list, name_list, num_cores
from profiling.measure.record import write_json
from profiling.measure.shapes import MASKS
from profiling.measure.tables import Table, markdown, print_lines, show
from profiling.measure.timing import EventTimer, GraphTimer
from profiling.studies import (
    context_parallel,
    numerics,
    numerics_gpu,
    numerics_report,
    standard,
    standard_bytes,
    standard_case,
    standard_report,
    training,
)

SCHEMA = 1
OK, FAILED = 0, 1

# Name, help and examples -> the parser of a command.
Add = Callable[..., argparse.ArgumentParser]


def add_commands(add: Add) -> None:
    """Add the parsers of the commands."""
    parser = add(
        "standard",
        "measure standard (unfused) attention beside cute_flash: time, memory and HBM bytes",
        "",
        "--bytes  # count HBM bytes with Nsight Compute, into the same file",
        "--dry-run  # small shapes on the CPU",
    )
    _add_standard(parser)
    parser = add(
        "numerics",
        "measure errors against fp64 by length, rescales, tile width, distribution and dtype",
        "--cpu",
        "--gpu",
        "--gpu --dry-run  # small shapes on the CPU",
    )
    _add_numerics(parser)
    parser = add(
        "training",
        "measure training steps of a Llama through each integration and other libraries; about "
        f"{training.EXPECTED_SECONDS} s on an H200",
        "--out training.json",
        "--dry-run  # a small model on the CPU",
    )
    _add_training(parser)
    seconds = context_parallel.EXPECTED_SECONDS
    parser = add(
        "context-parallel",
        f"measure the kernels of all ranks on one card beside the unsharded call; about {seconds} s on an H200",
        "--seqlen 65536 --ranks 8 --out context-parallel.json",
        "--dry-run  # small shapes on the CPU",
    )
    _add_context_parallel(parser)


def _add_context_parallel(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, context_parallel.Settings()
    for name in ("seqlen", "ranks", "heads", "heads_kv", "head_dim", "rounds"):
        text = f"default: {getattr(defaults, name)}"
        add(f"--{name.replace('_', '-')}", type=at_least_one, metavar="N", help=text)
    add("--sharding", choices=SHARDINGS, help=f"default: {defaults.sharding}")
    add("--ms", type=float, help=f"back-to-back calls in a round, in ms (default: {defaults.ms})")
    _add_output(parser, "context-parallel")


def _add_standard(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, standard.Settings()
    add("--lengths", type=int_list, metavar="LIST", help="N (default: 512 to 32768; with --bytes 1024,4096,16384)")
    add("--head-dims", type=int_list, default=defaults.head_dims, metavar="LIST", help="default: 64,128")
    add("--masks", type=name_list, metavar="LIST", help=f"default: {','.join(MASKS)}; with --bytes full")
    add("--rounds", type=at_least_one, default=defaults.rounds, metavar="N", help="default: %(default)s")
    add("--ms", type=float, default=defaults.ms, help="back-to-back calls in a round, in ms (default: %(default)s)")
    add("--limit-s", type=float, default=defaults.limit_s, help="seconds of measurement (default: %(default)s)")
    add("--jobs", type=at_least_one, default=num_cores(), metavar="N", help="compiling processes (default: cores)")
    add("--bytes", action="store_true", help="count HBM bytes instead of time and memory, and add them to the file")
    add("--ncu", default="ncu", metavar="PROGRAM", help="path of Nsight Compute (default: %(default)s)")
    add("--csv", type=Path, metavar="FILE", help="with --bytes: read counters from the .csv of an earlier run; no GPU")
    _add_output(parser, "standard")


def _add_numerics(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cpu", action="store_true", help="the online softmax on the CPU: about two minutes")
    where.add_argument("--gpu", action="store_true", help="the kernels beside torch's SDPA: less than a minute")
    parser.add_argument("--limit-s", type=float, default=50.0, help="seconds of the GPU part (default: %(default)s)")
    parser.add_argument("--jobs", type=at_least_one, default=num_cores(), metavar="N", help="compiling processes")
    _add_output(parser, "numerics")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, training.Settings()
    lengths = ",".join(map(str, defaults.lengths))
    add("--lengths", type=int_list, default=defaults.lengths, metavar="LIST", help=f"default: {lengths}")
    add("--rounds", type=at_least_one, default=defaults.rounds, metavar="N", help="default: %(default)s")
    add("--ms", type=float, default=defaults.ms, help="back-to-back steps in a round, in ms (default: %(default)s)")
    add("--jobs", type=at_least_one, default=num_cores(), metavar="N", help="compiling processes (default: cores)")
    _add_output(parser, "training")


def _add_output(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: results/<gpu>/<date>-{name}.json")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU; writes only to --out")


def default_path(name: str, facts: dict[str, Any]) -> Path:
    """profiling/results/<gpu>/<date>-<name>.json; the folder "cpu" without a GPU."""
    gpu = (facts["gpu"] or "cpu").lower().removeprefix("nvidia ").split()[0]
    return machine.RESULTS / gpu / f"{datetime.date.today().isoformat()}-{name}.json"


def _text(facts: dict[str, Any], tables: Sequence[Table], notes: Sequence[str]) -> str:
    head = ", ".join(f"{name} {facts[name]}" for name in ("gpu", "torch", "git_commit", "source_digest", "date"))
    return "\n".join([head, "", *map(markdown, tables), *notes, ""])


def _write(path: Path | None, record: dict[str, Any], tables: Sequence[Table], notes: Sequence[str]) -> None:
    if path is not None:
        write_json(record, path)
        path.with_suffix(".txt").write_text(_text(record["machine"], tables, notes), encoding="utf-8")


def _need_gpu() -> None:
    if not arch.has_gpu():
        raise ValueError("no CUDA device: nothing can be measured; --dry-run tries it on the CPU")


# ---- standard


def run_standard(args: argparse.Namespace) -> int:
    if args.bytes:
        return _bytes(args)
    facts = machine.facts()
    if args.dry_run:
        settings, tools = replace(standard.DRY_SETTINGS, limit_s=args.limit_s), standard.dry_tools()
    else:
        _need_gpu()
        names = {f.name for f in fields(standard.Settings)} & set(vars(args))
        values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
        settings, tools = standard.Settings(**values), standard.cuda_tools()
        # A wrong mask or length is refused before anything is compiled.
        settings.shapes()
        precompile_keys(settings.keys(arch.detect(torch.cuda.current_device())), args.jobs)
    path = args.out or (None if args.dry_run else default_path("standard", facts))
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": facts,
        "settings": asdict(settings),
        "before": machine.card_state(),
        "bytes": None,
        "is_dry_run": args.dry_run,
    }

    def save(cells: list[dict[str, Any]], left_out: list[str]) -> None:
        record.update(cells=list(cells), left_out=list(left_out), after=machine.card_state())
        if path is not None:
            write_json(record, path)

    with steps("timing standard attention", len(standard.DIRECTIONS) * len(settings.shapes())) as done:
        standard.run_standard(settings, tools, done, save)
    return _show_standard(record, path)


def _show_standard(record: dict[str, Any], path: Path | None) -> int:
    tables, failures = standard_report.tables(record), standard_report.failures(record)
    show(tables)
    print_lines("Failures", failures)
    _write(path, record, tables, failures)
    return FAILED if failures else OK


def _bytes(args: argparse.Namespace) -> int:
    """Count bytes and add them to the record of the times, which must come from the same source code."""
    defaults = standard_case.BYTES_SETTINGS
    settings = replace(
        defaults, lengths=args.lengths or defaults.lengths, head_dims=args.head_dims, masks=args.masks or defaults.masks
    )
    facts = machine.facts()
    path = args.out or default_path("standard", facts)
    command = standard_bytes.command(args.ncu, Path("standard.ncu-rep"), settings)
    if args.dry_run:
        print(" ".join(command))
        print_lines("Cases", [f"{case.peer} {case.key}" for case in standard_case.cases(settings)])
        return OK
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if args.csv:
        if record is None:
            raise ValueError(
                f"{path}: no record to add the counters to; measure without --bytes first, or name its file with --out"
            )
        counted = standard_bytes.counted(parse_raw(args.csv.read_text()), standard_case.cases(settings))
        # The counters are those of the earlier run.
        facts = (record["bytes"] or record)["machine"]
        version = None
    else:
        _need_gpu()
        if record is not None and record["machine"]["source_digest"] != facts["source_digest"]:
            raise ValueError(f"{path}: measured with other source code; choose another file with --out")
        tool = ncu.Tool(path.parent, args.ncu)
        tool.check()
        version = tool.version
        precompile_keys(settings.keys(arch.detect(torch.cuda.current_device())), args.jobs)
        csv = path.with_name(f"{path.stem}-ncu.csv")
        csv.parent.mkdir(parents=True, exist_ok=True)
        counted = standard_bytes.count(settings, args.ncu, save_csv=lambda text: _save_text(csv, text))
    record = record or {"schema": SCHEMA, "machine": facts, "settings": asdict(settings), "cells": [], "left_out": []}
    record["bytes"] = {"machine": facts, "ncu": version, "settings": asdict(settings), "cells": counted}
    for key, peers in counted.items():
        for name, found in peers.items():
            moved = found["read"] + found["write"]
            print(f"{key}, {name}: {moved / 1e6:,.0f} MB in {found['launches']} launches")
    missing = [
        f"{case.peer} {case.key}: no launch was counted"
        for case in standard_case.cases(settings)
        if case.peer not in counted.get(case.key, {})
    ]
    print_lines("Failures", missing)
    return max(_show_standard(record, path), FAILED if missing else OK)


def _save_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


# ---- numerics


def run_numerics(args: argparse.Namespace) -> int:
    return _numerics_cpu(args) if args.cpu else _numerics_gpu(args)


def _numerics_cpu(args: argparse.Namespace) -> int:
    facts = {**machine.facts(), "gpu": None}
    sizes = numerics.SMALL if args.dry_run else numerics.Sizes()
    # One thread: sums of a matrix product then have the same order on every machine with the same library.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with steps("errors on the CPU", len(numerics.STUDIES)) as done:
            records = numerics.run_cpu(sizes, done)
    finally:
        torch.set_num_threads(threads)
    path = args.out or (None if args.dry_run else default_path("numerics", facts))
    record = {"schema": SCHEMA, "machine": facts, "settings": asdict(sizes), "records": records}
    tables = numerics_report.cpu_tables(records)
    show(tables)
    _write(path, record, tables, [])
    return OK


def _numerics_gpu(args: argparse.Namespace) -> int:
    facts = machine.facts()
    settings = replace(numerics_gpu.SMALL if args.dry_run else numerics_gpu.Settings(), limit_s=args.limit_s)
    device = torch.device("cpu" if args.dry_run else "cuda")
    if not args.dry_run:
        _need_gpu()
        precompile_keys(settings.keys(arch.detect(torch.cuda.current_device())), args.jobs)
    path = args.out or (None if args.dry_run else default_path("numerics", facts))
    record: dict[str, Any] = {"schema": SCHEMA, "machine": facts, "settings": asdict(settings)}

    def save(records: list[dict[str, Any]], left_out: list[str]) -> None:
        record.update(records=list(records), left_out=list(left_out))
        if path is not None:
            write_json(record, path)

    num_cases = len(settings.dtypes) * len(settings.distributions) * len((*settings.lengths, *settings.grad_lengths))
    with steps("errors on the GPU", num_cases) as done:
        numerics_gpu.run_gpu(settings, device, done, save)
    tables = [numerics_report.gpu(record["records"])]
    absent = [f"absent: {line}" for line in numerics_report.absent(record["records"])]
    show(tables)
    print_lines("No result", absent)
    print_lines("Left out, the time was up", record["left_out"])
    _write(path, record, tables, absent)
    return FAILED if record["left_out"] else OK


# ---- training


class HostTimer(EventTimer):
    """Wall time, for a dry run."""

    def milliseconds(self, run: Callable[[], None]) -> float:
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)

    def synchronize(self) -> None:
        pass


def run_training(args: argparse.Namespace) -> int:
    facts = machine.facts()
    if not args.dry_run:
        _need_gpu()
    values = {name: getattr(args, name) for name in ("lengths", "rounds", "ms")}
    settings = training.SMALL if args.dry_run else training.Settings(**values)
    path = args.out or (None if args.dry_run else default_path("training", facts))
    others: dict[str, Any] = training.ON_CPU if args.dry_run else {"compile": partial(precompile_keys, jobs=args.jobs)}
    num_sides = len(others.get("sides", training.SIDES))
    with steps("training steps", num_sides * len(settings.lengths)) as done:
        tools = training.Tools(
            timer=HostTimer() if args.dry_run else EventTimer(),
            device=torch.device("cpu" if args.dry_run else "cuda"),
            facts=lambda: facts,
            card_state=machine.card_state,
            progress=done,
            save=partial(write_json, path=path) if path else lambda record: None,
            **others,
        )
        record = training.run_training(settings, tools)
    tables, notes = [training.table(record)], [training.summary(record), *training.failures(record)]
    show(tables)
    print("\n".join(notes))
    _write(path, record, tables, notes)
    return FAILED if training.has_failed(record) else OK


# ---- context parallelism


def run_context_parallel(args: argparse.Namespace) -> int:
    facts, base = machine.facts(), context_parallel.DRY_SETTINGS if args.dry_run else context_parallel.Settings()
    names = {f.name for f in fields(context_parallel.Settings)} & set(vars(args))
    settings = replace(base, **{name: getattr(args, name) for name in names if getattr(args, name) is not None})
    settings.check()
    if not args.dry_run:
        _need_gpu()
    device, timer = (
        (torch.device("cpu"), standard.HostTimer()) if args.dry_run else (torch.device("cuda"), GraphTimer())
    )
    path = args.out or (None if args.dry_run else default_path("context-parallel", facts))
    record: dict[str, Any] = {"schema": SCHEMA, "machine": facts, "is_dry_run": args.dry_run}

    def save(found: dict[str, Any]) -> None:
        record.update(found, after=machine.card_state())
        if path is not None:
            write_json(record, path)

    with torch.no_grad():
        context_parallel.run(settings, device, timer, save)
    tables = [context_parallel.table(record)]
    failures = [f"{name}: {text}" for x in record["directions"].values() for name, text in x["errors"].items()]
    show(tables)
    print_lines("Failures", failures)
    _write(path, record, tables, failures)
    return OK if args.dry_run or (context_parallel.meets_goal(record) and not failures) else FAILED


COMMANDS = {
    "standard": run_standard,
    "numerics": run_numerics,
    "training": run_training,
    "context-parallel": run_context_parallel,
}
