"""`python -m profiling all`: the runs behind every measured number of the README and the docs, one after another.

A run is a command of `python -m profiling` in its own process. Its result is results/<gpu>/<date>-<name>.json, which
the tables and figures of the documents read (`figures.newest`). kernels-<commit>.json has the digests of the kernels.
A run writes to the folder UNFINISHED, and its files move up when it has ended. A run that has ended on the same day at
the present commit is not repeated, so an interrupted series can be resumed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from profiling.counters.ncu import run_command
from profiling.documents import kernel_changes
from profiling.measure import machine
from profiling.measure.options import name_list
from profiling.measure.record import write_json
from profiling.measure.study import FAILED, OK, Command, need_gpu
from profiling.measure.tables import Table, number, show

PAPER = "bench --suite paper --graph --layout bshd"
UNFINISHED = "unfinished"
SM80 = "--kernels sm80 --providers cute_flash,sdpa-flash"
# The mma.sync kernels with the tiles of Hopper, of an A100, and of GPUs with 99 KB of shared memory.
TILES = "--providers sdpa-flash,cute_flash-sm80,cute_flash-A100,cute_flash-L40S --rounds 4"
WIDE = "bench --suite wide --graph --layout bshd --reference ffpa --providers cute_flash,cute_flash-sm80,ffpa"
# The head dims of all runs without features.
_FORWARD = (
    *(f"fwd/sm90/*/d{d}/*/plain/*" for d in (64, 128, 256)),
    "fwd/sm90/*/d64/*/k512/*",
    "fwd/sm90/*/d256/*/k512/*",
)
FWD_PLAIN = (*_FORWARD, "fwd/sm90/*/pack_gqa*")
BWD_PLAIN = (*_FORWARD, "bwd/sm90/*/plain/*")
# Plain calls of head dims above 256, by both families.
_WIDE = tuple(f"sm?0/sm_90/d{d}/bf16/{mask}/plain/*" for d in (320, 384, 512) for mask in ("full", "causal"))
# Runs without features, by wgmma. Those of `host` have features, but host times do not depend on machine code.
PLAIN = (*BWD_PLAIN, "merge/sm_90/*")


@dataclass(frozen=True)
class Step:
    """A run: its name, its command, and its expected seconds on an H200, with compilation."""

    name: str
    command: str
    seconds: int
    then: str | None = None  # a second command, which adds to the file of the first
    kernels: tuple[str, ...] = ("*/sm_90/*",)  # patterns of the names in `tests/lock` of the kernels that it measures

    def arguments(self, path: Path) -> list[list[str]]:
        """The arguments of each command."""
        return [[*text.split(), "--out", str(path)] for text in (self.command, self.then) if text is not None]


STEPS = (
    Step("fwd-sm90-paper", f"{PAPER} --outliers --reference fa3", 140, kernels=FWD_PLAIN),
    Step("bwd-sm90-paper", f"{PAPER} --direction bwd --reference fa3", 150, kernels=BWD_PLAIN),
    Step("fwd-sm80-paper", f"{PAPER} {SM80}", 45, kernels=("fwd/sm80/sm_90/*/bf16/*",)),
    Step("bwd-sm80-paper", f"{PAPER} {SM80} --direction bwd", 60, kernels=("bwd/sm80/sm_90/*/bf16/*",)),
    Step(
        "bwd-sm80-paper-bhsd",
        f"bench --suite paper --graph --layout bhsd {SM80} --direction bwd --rounds 4",
        45,
        kernels=("bwd/sm80/sm_90/*/bf16/*",),
    ),
    Step("tiles-fwd", f"{PAPER} {TILES}", 50, kernels=("fwd/sm80/sm_90/*/bf16/*/plain/*",)),
    Step("tiles-bwd", f"{PAPER} {TILES} --direction bwd", 65, kernels=("bwd/sm80/sm_90/*/bf16/*/plain/*",)),
    Step("fwd-sm90-gqa", "bench --suite gqa --graph --layout bshd --reference fa3", 35, kernels=FWD_PLAIN),
    Step("fwd-sm90-gqa8", "bench --suite gqa8 --graph --layout bshd --reference fa3", 35, kernels=FWD_PLAIN),
    Step("wide-fwd", WIDE, 60, kernels=tuple(f"fwd/{names}" for names in _WIDE)),
    Step("wide-bwd", f"{WIDE} --direction bwd", 90, kernels=tuple(f"bwd/{names}" for names in _WIDE)),
    Step("fp32", "fp32", 80, kernels=("*/sm_90/*/fp32/*",)),
    Step("decode", "decode", 45, kernels=("decode/*/sm_90/*", "merge/sm_90/*")),
    Step("decode-mla", "decode --mla", 60, kernels=("decode/*/sm_90/*latent*",)),
    Step("features", "features", 90, kernels=("*/sm90/sm_90/*",)),
    Step("mods", "mods --parallel", 160, kernels=("*/sm90/sm_90/d64/*", "*/sm90/sm_90/d128/*")),
    Step("training", "training", 120, kernels=PLAIN),
    Step("context-parallel", "context-parallel", 40, kernels=PLAIN),
    Step("standard", "standard", 90, then="standard --bytes", kernels=PLAIN),
    Step("numerics", "numerics --gpu", 30, kernels=PLAIN),
    Step("host", "host --start", 140, kernels=PLAIN),
)

# Endings of the files of a run: results, printed tables, counters of Nsight Compute.
ENDINGS = (".json", ".txt", "-ncu.csv")


# Runs `python -m profiling` with these arguments and a time limit in seconds; returns its exit status and its output.
Runner = Callable[[Sequence[str], float], tuple[int, str]]


def run_process(arguments: Sequence[str], limit_s: float) -> tuple[int, str]:
    # Progress goes to the terminal.
    status, output = run_command([sys.executable, "-m", "profiling", *arguments], limit_s, stderr=None)
    print(output, flush=True)
    return status, output


DONE, SKIPPED = "done", "not repeated"


@dataclass(frozen=True)
class Outcome:
    step: Step
    text: str  # DONE, SKIPPED, or why the run has no result
    seconds: float | None = None


def has_ended(path: Path, commit: str) -> bool:
    """Whether the result file of a run at this commit exists."""
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["machine"]["git_commit"] == commit


def finish(unfinished: Path, path: Path) -> None:
    """Move the files of a run."""
    for ending in ENDINGS:
        source = unfinished.with_name(unfinished.stem + ending)
        if source.exists():
            source.replace(path.with_name(path.stem + ending))


def chosen_steps(names: Sequence[str]) -> list[Step]:
    """The steps with these names, all without names."""
    known = {step.name: step for step in STEPS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {','.join(unknown)}: choose from {', '.join(known)}")
    return [known[name] for name in known if not names or name in names]


def run_all(
    steps: Sequence[Step],
    folder: Path,
    facts: dict[str, str],
    budget_s: float | None = None,
    run: Runner = run_process,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run the steps in order. With a budget, a step that would exceed it is left out.

    `facts`: "date", as in the names of result files, "git_commit" and "source_digest". A failed step does not stop the
    others. `tests/lock` must have the digests of the present kernels (`make lock`).
    """
    begin, outcomes = clock(), []
    (folder / UNFINISHED).mkdir(parents=True, exist_ok=True)
    for step in steps:
        path = folder / f"{facts['date']}-{step.name}.json"
        unfinished = folder / UNFINISHED / path.name
        left = float("inf") if budget_s is None else budget_s - (clock() - begin)
        if has_ended(path, facts["git_commit"]):
            outcomes.append(Outcome(step, SKIPPED))
            continue
        if step.seconds > left:
            outcomes.append(Outcome(step, "no time left"))
            continue
        for ending in ENDINGS:  # of a run that failed
            unfinished.with_name(unfinished.stem + ending).unlink(missing_ok=True)
        before = clock()
        # Twice the expected time: a run that hangs must not take the time of all others.
        limit_s = min(2.0 * step.seconds, left)
        done = [run(arguments, limit_s) for arguments in step.arguments(unfinished)]
        status, text = max(code for code, _ in done), unfinished.with_suffix(".txt")
        if not text.exists():  # some commands write this file themselves
            head = f"python -m profiling {step.command}; commit {facts['git_commit']}, {facts['date']}\n\n"
            text.write_text(head + "\n".join(output for _, output in done), encoding="utf-8")
        if status in (OK, FAILED) and unfinished.exists():
            finish(unfinished, path)
        outcome = DONE if status == 0 else f"exit status {status}" + ", measured" * (status in (OK, FAILED))
        outcomes.append(Outcome(step, outcome, clock() - before))
    has_run, commit = any(one.seconds is not None for one in outcomes), facts["git_commit"]
    if has_run and commit and kernel_changes.LOCK.exists():  # an image may lack the commit and the tests
        snapshot = kernel_changes.snapshot(commit, facts["source_digest"])
        write_json(snapshot, folder / kernel_changes.file_name(commit))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> Table:
    rows = ((one.step.name, one.text, number(one.seconds, ".0f"), str(one.step.seconds)) for one in outcomes)
    return Table("Runs", ("name", "outcome", "seconds", "expected"), tuple(rows))


def list_table(steps: Sequence[Step]) -> Table:
    rows = []
    for step in steps:
        commands = "; ".join(f"python -m profiling {text}" for text in (step.command, step.then) if text)
        rows.append((step.name, commands, str(step.seconds)))
    total = sum(step.seconds for step in steps)
    return Table(f"Runs, about {total // 60} minutes on an H200", ("name", "command", "seconds"), tuple(rows))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", type=name_list, default=(), metavar="LIST", help="names of runs (default: all)")
    add("--list", action="store_true", help="print the runs and their commands; needs no GPU")
    add("--budget-s", type=float, metavar="SECONDS", help="start no run that would not end within this time")
    add("--out", type=Path, metavar="DIR", help="default: profiling/results/<gpu>")


def run(args: argparse.Namespace) -> int:
    chosen = chosen_steps(args.only)
    if args.list:
        show([list_table(chosen)])
        return OK
    need_gpu("; --list prints the commands")
    facts = machine.facts()
    example = machine.default_path("", facts)
    date = example.name[: len("2026-01-31")]
    known = {"date": date, **{name: facts[name] for name in ("git_commit", "source_digest")}}
    folder = (args.out or example.parent).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(chosen, folder, known, args.budget_s)
    show([table(outcomes)])
    return OK if all(one.text in (DONE, SKIPPED) for one in outcomes) else FAILED


COMMAND = Command(
    "all",
    "all runs that the README and the docs show",
    (
        "--list  # needs no GPU",
        "--budget-s 600  # leave out runs that would not end in time; a second call resumes",
        "--only decode,mods",
    ),
    add_arguments,
    run,
)
