"""Kernels whose machine code, and shapes whose launch plan, changed since a measurement, by the lock (`tests/lock`).

A file kernels-<commit>.json has the digests at the commit of a run, of machine code and of launch plans: grids, L2
groups and workspace. `python -m profiling all` writes it.
"""

from __future__ import annotations

import hashlib
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from profiling.measure.machine import ROOT

LOCK = ROOT / "tests" / "lock" / "digests.json"
PLANS = "plans.json"  # beside the digests
# Names in a sentence; further names are counted.
SHOWN = 5


def file_name(commit: str) -> str:
    """The name of the file that has the digests at a commit."""
    return f"kernels-{commit[:7]}.json"


def snapshot(commit: str, source_digest: str, lock: Path = LOCK) -> dict[str, Any]:
    """The digests of all kernels (toolchain -> kernel -> entry of the lock) and launch plans, and their source."""
    digests = json.loads(lock.read_text(encoding="utf-8"))
    return {"git_commit": commit, "source_digest": source_digest, "digests": digests, "plans": _plans(lock)}


def _plans(lock: Path) -> dict[str, str]:
    """A digest of each launch plan beside the lock, by its name."""
    plans = json.loads(lock.with_name(PLANS).read_text(encoding="utf-8"))
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in plans.items()}


def _of_hosts(entry: str | dict[str, str] | None) -> set[str]:
    """The digests of a kernel on all hosts; most kernels have one."""
    if entry is None:
        return set()
    return {entry} if isinstance(entry, str) else set(entry.values())


def changed(measured: dict[str, Any], patterns: tuple[str, ...] = ("*",), lock: Path = LOCK) -> tuple[int, list[str]]:
    """(number of measured kernels, names of those whose machine code has changed since).

    Only kernels whose names match one of the patterns (fnmatch) count. A kernel that is no longer in the lock, or was
    recorded with another toolchain, counts as changed.
    """
    now = json.loads(lock.read_text(encoding="utf-8"))
    chosen = {
        (toolchain, name): entry
        for toolchain, digests in measured["digests"].items()
        for name, entry in digests.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    differ = [
        name
        for (toolchain, name), entry in chosen.items()
        if not _of_hosts(now.get(toolchain, {}).get(name)) & _of_hosts(entry)
    ]
    return len(chosen), differ


def changed_plans(measured: dict[str, Any], patterns: tuple[str, ...] = ("*",), lock: Path = LOCK) -> tuple[int, int]:
    """(number of launch plans whose names match one of the patterns, number of these plans that have changed)."""
    now = _plans(lock)
    chosen = {
        name: plan
        for name, plan in measured["plans"].items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    return len(chosen), sum(now.get(name) != plan for name, plan in chosen.items())


def sentence(measured: dict[str, Any], patterns: tuple[str, ...] = ("*",), lock: Path = LOCK) -> str:
    """Part of a sentence: the commit of measurements, and which kernels and launch plans have changed since."""
    num_plans, num_changed = changed_plans(measured, patterns, lock)
    launched = ""
    if num_plans:
        what = f"{num_changed} have changed since" if num_changed else "all are unchanged since"
        launched = f"; of {num_plans} launch plans of the published shapes, {what}"
    return f"commit `{measured['git_commit'][:7]}`; {_code(measured, patterns, lock)}{launched}"


def _code(measured: dict[str, Any], patterns: tuple[str, ...], lock: Path) -> str:
    num_kernels, differ = changed(measured, patterns, lock)
    if not differ and num_kernels == 1:
        return "the machine code of this kernel is unchanged since"
    if not differ:
        return f"the machine code of all {num_kernels} of their kernels in the lock is unchanged since"
    more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
    names = ", ".join(f"`{name}`" for name in differ[:SHOWN])
    counts = f"{len(differ)} of {num_kernels} of their kernels in the lock"
    return f"the machine code of {counts} has changed since: {names}{more}"
