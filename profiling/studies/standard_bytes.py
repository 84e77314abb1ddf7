"""HBM bytes of standard attention and of cute_flash, counted by Nsight Compute.

Nsight Compute runs `python -m profiling.studies.standard_bytes`. One process makes all calls, because starting a
process takes longer than the calls. Between the profiler's start and stop, each case has two parts, each ended by a
marker kernel: the call itself, and a read of a buffer that is larger than L2. The read evicts what the call left in
L2, so that all bytes that the call wrote are counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cute_flash.tools.precompile import precompile_keys
from profiling.counters import ncu
from profiling.counters.ncu_metrics import METRICS, Profile, parse_raw, trim_raw
from profiling.measure import machine
from profiling.measure.options import add_options, settings_of
from profiling.measure.shapes import DTYPES, Shape
from profiling.measure.study import FAILED, OK, SCHEMA, Study, Tools, need_gpu
from profiling.measure.tables import print_lines
from profiling.peers.directions import DIRECTIONS
from profiling.studies import standard, standard_report
from profiling.studies.standard import DTYPE, PEERS, Settings

# A part of the symbol of `torch.cuda._sleep`'s kernel, which no attention runs.
MARKER = "spin_kernel"
SCRATCH_BYTES = 256 << 20
BYTES_SETTINGS = Settings(lengths=(1024, 4096, 16384), masks=("full",))
READ, WRITE = "dram_read_bytes", "dram_write_bytes"


@dataclass(frozen=True)
class Case:
    peer: str
    direction: str
    shape: Shape

    @property
    def key(self) -> str:
        """The key of the cell in the record of `python -m profiling standard`."""
        return f"{self.direction}-{self.shape.id}"


def cases(settings: Settings) -> list[Case]:
    """All cases, in the order in which they are profiled."""
    return [
        Case(peer.name, direction, shape) for shape in settings.shapes() for direction in DIRECTIONS for peer in PEERS
    ]


# ---- the process that is profiled


def _prepare(case: Case, seed: int) -> Callable[[], Any]:
    direction, device = DIRECTIONS[case.direction], torch.device("cuda")
    peer = next(one for one in PEERS if one.name == case.peer)
    inputs = direction.inputs(case.shape, DTYPES[DTYPE], device, seed, "normal")
    return direction.prepare(peer, inputs, case.shape.causal)


@torch.no_grad()
def call_all(settings: Settings) -> None:
    scratch = torch.ones(SCRATCH_BYTES // 4, device="cuda")
    for case in cases(settings):
        call: Callable[[], Any] = lambda: None  # noqa: E731
        try:
            call = _prepare(case, settings.seed)
            # Compiles, loads and allocates.
            call()
        except Exception as error:
            print(f"{case.peer} {case.key}: {error}", file=sys.stderr)
        # L2 is full of clean lines when the call starts.
        scratch.sum()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        try:
            call()
        except Exception as error:
            print(f"{case.peer} {case.key}: {error}", file=sys.stderr)
        torch.cuda._sleep(1)
        scratch.sum()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del call
        Tools().release()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, Settings)
    call_all(settings_of(Settings, parser.parse_args(argv), BYTES_SETTINGS))


# ---- the command


def command(program: str, report: Path, settings: Settings) -> list[str]:
    """The command of ncu. It counts in one pass, so no launch is replayed, and does not flush the caches."""
    return [
        program,
        "--force-overwrite",
        *("--export", str(report.with_suffix(""))),
        *("--profile-from-start", "off"),
        *("--clock-control", "none"),
        *("--cache-control", "none"),
        *("--metrics", ",".join(METRICS[name] for name in (READ, WRITE))),
        *(Path(sys.executable).name, "-m", "profiling.studies.standard_bytes"),
        *("--lengths", ",".join(map(str, settings.lengths))),
        *("--head-dims", ",".join(map(str, settings.head_dims))),
        *("--masks", ",".join(settings.masks)),
    ]


def _sections(profiles: Sequence[Profile]) -> list[list[Profile]]:
    """For each marker kernel, the launches between the previous marker and it."""
    sections: list[list[Profile]] = [[]]
    for profile in profiles:
        if MARKER in profile.kernel:
            sections.append([])
        else:
            sections[-1].append(profile)
    return sections[:-1]


def counted(profiles: Sequence[Profile], expected: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Cell -> peer -> bytes read and written, and the number of launches.

    The reads are those of the call; the writes those of the call and of the eviction after it.
    """
    sections = _sections(profiles)
    if len(sections) != 2 * len(expected):
        raise ncu.NcuError(
            f"{len(sections)} marker kernels in the report, expected {2 * len(expected)}: two for each case"
        )
    found: dict[str, dict[str, Any]] = {}
    for i, case in enumerate(expected):
        call, eviction = sections[2 * i : 2 * i + 2]
        if not call:
            continue
        found.setdefault(case.key, {})[case.peer] = {
            "read": sum(profile[READ] or 0.0 for profile in call),
            "write": sum(profile[WRITE] or 0.0 for profile in (*call, *eviction)),
            "launches": len(call),
            "kernels": [profile.kernel for profile in call],
        }
    return found


def count(
    settings: Settings,
    program: str,
    run: ncu.Runner = ncu.run_command,
    save_csv: Callable[[str], Any] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Profile all cases in one process and read the report.

    Raises:
        NcuError: ncu fails, or counts something else than the cases.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "standard.ncu-rep"
        _must_run(run, command(program, report, settings))
        raw = _must_run(run, [program, "--import", str(report), "--page", "raw", "--csv", "--print-units", "base"])
    save_csv(trim_raw(raw))
    return counted(parse_raw(raw), cases(settings))


def _must_run(run: ncu.Runner, line: Sequence[str]) -> str:
    status, output = run(line)
    if ncu.NO_PERMISSION in output:
        raise ncu.NotPermittedError(ncu.NOT_PERMITTED)
    if status:
        raise ncu.NcuError(f"{line[0]} ended with status {status}:\n{output[-2000:]}")
    return output


STUDY = Study(
    name="standard",
    help="standard (unfused) attention: time, memory, HBM bytes",
    examples=(
        "",
        "--bytes  # count HBM bytes with Nsight Compute, into the same file",
        "--dry-run  # small shapes on the CPU",
    ),
    settings=Settings,
    check=Settings.shapes,
    kernels=standard.kernels,
    parts=lambda settings, tools: {"bytes": None, "cells": []},
    steps=standard.steps,
    tables=standard_report.tables,
    failures=standard_report.failures,
    has_own_file=True,
    small=standard.DRY_SETTINGS,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    STUDY.add_arguments(parser)
    add = parser.add_argument
    add("--bytes", action="store_true", help="count HBM bytes instead of time and memory, and add them to the file")
    add("--ncu", default="ncu", metavar="PROGRAM", help="path of Nsight Compute (default: %(default)s)")
    add("--csv", type=Path, metavar="FILE", help="with --bytes: read counters from the .csv of an earlier run; no GPU")


def run_bytes(args: argparse.Namespace) -> int:
    """Count bytes and add them to the record of the times, which must come from the same source code."""
    settings = settings_of(Settings, args, BYTES_SETTINGS)
    facts = machine.facts()
    path = args.out or machine.default_path("standard", facts)
    if args.dry_run:
        print(" ".join(command(args.ncu, Path("standard.ncu-rep"), settings)))
        print_lines("Cases", [f"{case.peer} {case.key}" for case in cases(settings)])
        return OK
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if args.csv:
        if record is None:
            raise ValueError(
                f"{path}: no record to add the counters to; measure without --bytes first, or name its file with --out"
            )
        found_bytes = counted(parse_raw(args.csv.read_text()), cases(settings))
        # The counters are those of the earlier run.
        facts = (record["bytes"] or record)["machine"]
        version = None
    else:
        need_gpu()
        if record is not None and record["machine"]["source_digest"] != facts["source_digest"]:
            raise ValueError(f"{path}: measured with other source code; choose another file with --out")
        tool = ncu.Tool(path.parent, args.ncu)
        tool.check()
        version = tool.version
        precompile_keys(standard.kernels(settings, Tools()), args.jobs)
        csv = path.with_name(f"{path.stem}-ncu.csv")
        csv.parent.mkdir(parents=True, exist_ok=True)
        found_bytes = count(settings, args.ncu, save_csv=lambda text: csv.write_text(text, encoding="utf-8"))
    record = record or {"schema": SCHEMA, "machine": facts, "settings": asdict(settings), "cells": [], "left_out": []}
    record["bytes"] = {"machine": facts, "ncu": version, "settings": asdict(settings), "cells": found_bytes}
    for key, by_peer in found_bytes.items():
        for name, found in by_peer.items():
            moved = found["read"] + found["write"]
            print(f"{key}, {name}: {moved / 1e6:,.0f} MB in {found['launches']} launches")
    missing = [
        f"{case.peer} {case.key}: no launch was counted"
        for case in cases(settings)
        if case.peer not in found_bytes.get(case.key, {})
    ]
    print_lines("Failures", missing)
    return max(STUDY.report(record, path), FAILED if missing else OK)


def run(args: argparse.Namespace) -> int:
    return run_bytes(args) if args.bytes else STUDY.run(args)


COMMAND = replace(STUDY.command, add_arguments=add_arguments, run=run)


if __name__ == "__main__":
    main()
