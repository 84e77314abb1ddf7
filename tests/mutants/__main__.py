"""Apply each mutant to a copy of the tree and run its tests; see `tests.mutants`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.mutants.table import MUTANTS, ROOT, Mutant

KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "BROKEN"
# A mutant may loop forever.
SECONDS = 900


class Outcome(NamedTuple):
    verdict: str
    detail: str  # the test that failed, or the end of the output
    seconds: float


def copy_tree(folder: Path) -> None:
    """Copy the tracked files, and those that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file() and not name.startswith("profiling/reports"):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


@contextmanager
def applied(mutant: Mutant, root: Path) -> Iterator[None]:
    path = mutant.file(root)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def run_tests(tests: Sequence[str], root: Path) -> tuple[int, str]:
    """Exit status of pytest (124: time was up), and its output. The copy comes first on the path of imports."""
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return 124, "time was up"
    return done.returncode, done.stdout + done.stderr


def outcome(mutant: Mutant, root: Path) -> Outcome:
    begin = time.perf_counter()
    with applied(mutant, root):
        status, output = run_tests(mutant.tests, root)
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))] or output.splitlines()[-3:]
    # Status 1: a test failed. Others than 0 (passed) and 124 mean that the mutant or its tests cannot be run.
    verdict = {0: SURVIVED, 1: KILLED, 124: KILLED}.get(status, BROKEN)
    return Outcome(verdict, " ".join(lines)[:200], time.perf_counter() - begin)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", default="*", help="only mutants whose names match (fnmatch)")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="mutants at a time")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mutant first")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if fnmatch(mutant.name, f"*{options.only}*")]
    if not chosen:
        parser.error(f"no mutant matches {options.only}")
    with tempfile.TemporaryDirectory(prefix="cute_flash_mutants_") as folder:
        roots: SimpleQueue[Path] = SimpleQueue()
        for i in range(options.jobs):
            copy_tree(Path(folder, str(i)))
            roots.put(Path(folder, str(i)))
        if not options.no_baseline:
            tests = sorted({test for mutant in chosen for test in mutant.tests})
            root = roots.get()
            status, output = run_tests(tests, root)
            roots.put(root)
            if status:
                print(output)
                print("the tests fail without a mutant")
                return 2

        def work(mutant: Mutant) -> Outcome:
            root = roots.get()
            try:
                return outcome(mutant, root)
            finally:
                roots.put(root)

        found: dict[Mutant, Outcome] = {}
        with ThreadPoolExecutor(options.jobs) as pool:
            futures = {pool.submit(work, mutant): mutant for mutant in chosen}
            for future in as_completed(futures):
                mutant, one = futures[future], future.result()
                found[mutant] = one
                print(f"[{len(found)}/{len(chosen)}] {one.verdict:8} {one.seconds:5.0f} s  {mutant.name}", flush=True)
                print(f"    {one.detail}", flush=True)
    print()
    areas = dict.fromkeys(mutant.where for mutant in chosen)
    for area in areas:
        verdicts = [found[mutant].verdict for mutant in chosen if mutant.where == area]
        print(f"{area:45} {verdicts.count(KILLED):3} of {len(verdicts):3} killed")
    others = [mutant for mutant in chosen if found[mutant].verdict != KILLED]
    for mutant in others:
        print(f"{found[mutant].verdict}: {mutant.name} -> {mutant.new}")
    print(f"{len(chosen) - len(others)} of {len(chosen)} mutants killed")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
