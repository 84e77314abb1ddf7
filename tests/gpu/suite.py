"""All GPU tests in pieces, with one log: python -m tests.gpu.suite LOG [option ...]

The log has one JSON object per line: the facts of the machine and of the code, then the result of each test when it
ends. A call that is stopped, by `--limit-s` or otherwise, loses nothing: the next call with the same log runs the tests
that have not passed. It refuses a log of other sources. Kernels are compiled first, on all cores.

    python -m tests.gpu.suite build/gpu.jsonl --kernels build/kernels --limit-s 550
    python -m tests.gpu.suite build/gpu.jsonl --summary        # of what the log has; runs nothing
    python -m tests.gpu.suite LOG -- tests/gpu/test_mods.py    # arguments of pytest

The exit status is 0 if every test has passed or was skipped. A test that failed and passes in a later call is flaky,
because the sources are the same; the status is then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEFAULT = ["tests/gpu", "--kernel-cache=build/kernels", "--random-calls=65"]
DONE = ("passed", "skipped")
BYTES_OF_PROCESS = 8 << 30  # of GPU memory
MAX_TEXT = 4000  # of the report of a failure


def source_digest(root: Path = ROOT) -> str:
    """A digest of the package and of the tests."""
    sha256 = hashlib.sha256()
    for folder in ("cute_flash", "layouts", "examples", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            sha256.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return sha256.hexdigest()[:16]


class Recorder:
    """A pytest plugin that appends the result of each test to the log when it ends."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test that passes has three reports; one that fails or is skipped, one with this outcome.
        if report.when != "call" and report.passed:
            return
        text = "" if report.passed else str(report.longrepr)[-MAX_TEXT:]
        result = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2), "text": text}
        append(self.log, result)


def append(log: Path, line: dict[str, Any]) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")


def read(log: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The facts of a log, and the last result of each test. One that failed before it passed is "flaky"."""
    if not log.exists():
        return {}, {}
    # The last line may be cut if the process was killed.
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    results: dict[str, dict[str, Any]] = {}
    for line in lines:
        if "test" in line:
            before = results.get(line["test"], line)
            is_flaky = line["outcome"] in DONE and before["outcome"] not in DONE
            results[line["test"]] = {**before, "outcome": "flaky"} if is_flaky else line
    return next((line for line in lines if "facts" in line), {}).get("facts", {}), results


def collect(arguments: list[str]) -> list[str]:
    """The ids of all tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not ids:
        raise SystemExit(f"no tests were collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return ids


def facts() -> dict[str, Any]:
    from profiling.measure import machine

    found = machine.facts()
    names = ("date", "gpu", "driver", "torch", "cutlass_dsl", "tvm_ffi", "python", "git_commit", "git_dirty")
    return {**{name: found.get(name) for name in names}, "sources": source_digest()}


def summary(log: Path, ids: Iterable[str] = ()) -> tuple[str, bool]:
    """The counts and the failures of a log as text, and whether all tests are done. `ids`: all tests."""
    about, results = read(log)
    counts = Counter(result["outcome"] for result in results.values())
    left = [test for test in ids if test not in results]
    lines = [", ".join(f"{name}: {value}" for name, value in about.items())]
    lines.append(", ".join(f"{count} {name}" for name, count in sorted(counts.items())) + f", {len(left)} not run")
    for test, result in sorted(results.items()):
        if result["outcome"] not in DONE:
            reason = next((x for x in result["text"].splitlines() if x.startswith("E ")), "")
            lines.append(f"{result['outcome']} {test}: {reason.removeprefix('E').strip()}")
    return "\n".join(lines) + "\n", not left and all(result["outcome"] in DONE for result in results.values())


def run(log: Path, ids: list[str], options: list[str], limit_s: float | None) -> None:
    """Run tests in a process of their own, which is ended with all its workers after `limit_s` seconds."""
    names = log.with_suffix(".ids")
    names.write_text("\n".join(ids) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "tests.gpu.suite", str(log), "--child", "--", *options, f"@{names}"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.suite", description=__doc__.partition("\n")[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--jobs", type=int, help="test processes (default: one for each core and 8 GB of the GPU)")
    parser.add_argument("--limit-s", type=float, help="seconds, compilation included (default: none)")
    parser.add_argument("--kernels", metavar="DIR", help="where kernels are compiled first, for --kernel-cache")
    parser.add_argument("--summary", action="store_true", help="print the results so far; run nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser.epilog = f"Arguments after -- are those of pytest (default: {' '.join(DEFAULT)})."
    args = parser.parse_args(sys.argv[1:cut])
    arguments = sys.argv[cut + 1 :] or DEFAULT
    if args.child:
        return int(pytest.main(arguments, plugins=[Recorder(args.log)]))
    if args.summary:
        print(summary(args.log)[0], end="")
        return 0
    cores = os.cpu_count() or 1
    jobs = args.jobs or min(cores, max(gpu_bytes() // BYTES_OF_PROCESS, 1))
    end = time.monotonic() + (args.limit_s or float("inf"))
    about, results = read(args.log)
    if about and about["sources"] != source_digest():
        parser.error(f"{args.log} is of other sources: use another file")
    args.log.parent.mkdir(parents=True, exist_ok=True)
    if not about:
        append(args.log, {"facts": facts()})
    ids = collect(arguments)
    if args.kernels:
        command = [sys.executable, "-m", "tests.gpu.precompile", args.kernels, str(cores)]
        subprocess.run(command, timeout=seconds_left(end), check=True)
    todo = [test for test in ids if results.get(test, {}).get("outcome") not in DONE]
    options = [x for x in arguments if x.startswith("-")] + ["-q", "-p", "no:cacheprovider"]
    options += ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    if todo:
        run(args.log, todo, options, seconds_left(end))
    text, is_done = summary(args.log, ids)
    print(text, end="")
    args.log.with_suffix(".txt").write_text(text, encoding="utf-8")
    return 0 if is_done else 1


def gpu_bytes() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


def seconds_left(end: float) -> float | None:
    """Seconds until a time of the monotonic clock; None: no limit."""
    return None if end == float("inf") else max(end - time.monotonic(), 0.0)


if __name__ == "__main__":
    sys.exit(main())
