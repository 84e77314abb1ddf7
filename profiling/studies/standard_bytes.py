"""HBM bytes of standard attention and of cute_flash, counted by Nsight Compute."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from profiling.counters import ncu
from profiling.counters.ncu_metrics import METRICS, Profile, parse_raw, trim_raw
from profiling.studies.standard import Settings
from profiling.studies.standard_case import MARKER, Case, cases

READ, WRITE = "dram_read_bytes", "dram_write_bytes"


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
        *(Path(sys.executable).name, "-m", "profiling.studies.standard_case"),
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
    save_csv: Callable[[str], None] = lambda text: None,
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
