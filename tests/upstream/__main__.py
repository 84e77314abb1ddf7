"""Run the tests of other projects; see `tests.upstream`."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from cute_flash.jit.describe import describe_key
from cute_flash.jit.kernels import precompile
from cute_flash.planning.plan import CompileKey
from tests.upstream import flex_mods, sdpa
from tests.upstream.jobs import Job, run_processes
from tests.upstream.summary import summarize

STEPS = {
    "fa": ("record", "compile", "run"),
    "sdpa": ("record", "compile", "run", "inactive"),
    "flex": ("record", "compile", "check", "time"),
}
WITH_RESULTS = ("record", "run", "inactive", "check")


def pytest_command(job: Job) -> list[str]:
    """pytest with the files of a suite, without the configuration and conftest.py files of any project."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-rA", f"--junitxml={job.path('xml')}"]
    command += ["-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-p", "tests.upstream.recording"]
    if job.suite == "sdpa":
        file = job.source(sdpa.FILE)
        return [*command, "-p", "tests.upstream.sdpa", f"--rootdir={file.parent}", str(file)]
    return [*command, f"--rootdir={Path(__file__).parent}", str(Path(__file__).with_name("fa.py"))]


def flex_command(job: Job) -> list[str]:
    return [sys.executable, "-m", "tests.upstream.flex"]


def compile_recorded(job: Job, processes: int, seconds: float) -> bool:
    """Compile the kernels that were recorded; return whether all are in the cache. Errors do not stop others."""
    os.environ.setdefault("CUTE_FLASH_CACHE_DIR", str(Path(job.out, "cache", "kernels").absolute()))
    keys: dict[CompileKey, None] = {}
    for path in sorted(replace(job, step="record").folder.glob("*.pkl")):
        keys |= dict.fromkeys(pickle.loads(path.read_bytes()))
    # The slowest compilations first, so that none is left alone at the end.
    order = sorted(keys, key=lambda key: not key.kernel.startswith(("bwd_sm", "fwd_sm")))
    begin, num_new, num_done = time.monotonic(), 0, 0
    pool = ProcessPoolExecutor(processes, get_context("spawn"))
    futures = {pool.submit(precompile, key): key for key in order}
    try:
        for future in as_completed(futures, timeout=seconds):
            if future.exception() is None:
                num_new += future.result()
                num_done += 1
            else:
                print(f"not compiled: {describe_key(futures[future])}: {future.exception()!r:.300}", flush=True)
    except TimeoutError:
        print(f"stopped after {seconds:.0f} s")
        for process in pool._processes.values():
            process.terminate()
    pool.shutdown(wait=False, cancel_futures=True)
    seconds = time.monotonic() - begin
    print(f"{job.suite} compile: {num_done} of {len(order)} kernels, {num_new} of them new, {seconds:.0f} s")
    return num_done == len(order)


def run_step(job: Job, processes: int, seconds: float) -> bool:
    """Run one step; return False if a compilation or a measurement failed. Results of tests are read afterwards."""
    command = flex_command if job.suite == "flex" else pytest_command
    if job.step == "compile":
        return compile_recorded(job, processes, seconds)
    if job.step != "time":
        run_processes(job, processes, command, seconds)
        return True
    # Everything is compiled in parallel first; then one process is alone on the GPU.
    run_processes(replace(job, step="warm"), processes, command, seconds)
    codes = run_processes(job, 1, command, seconds)
    print(job.path("log").read_text(encoding="utf-8"))
    return codes == [0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("suite", choices=STEPS)
    parser.add_argument(
        "steps", nargs="*", metavar="step", help="; ".join(f"{s}: {', '.join(STEPS[s])}" for s in STEPS)
    )
    parser.add_argument("--sources", required=True, help="folder with the clones")
    parser.add_argument("--out", required=True, help="folder of results and caches")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="LIMIT", help="time limit of each step")
    parser.add_argument("--mods", default="", metavar="A,B", help="(flex) only these mods")
    options = parser.parse_intermixed_args(argv)
    wrong = set(options.steps) - set(STEPS[options.suite])
    if wrong:
        parser.error(f"unknown step {', '.join(sorted(wrong))}: use {', '.join(STEPS[options.suite])}")
    out = Path(options.out).absolute()
    mods = tuple(filter(None, options.mods.split(",")))
    job = Job(options.suite, "", str(Path(options.sources).absolute()), str(out), mods=mods)
    is_good, texts = True, []
    for step in options.steps or STEPS[options.suite]:
        own = replace(job, step=step)
        is_good &= run_step(own, options.processes, options.seconds)
        if step in WITH_RESULTS:
            summary = summarize(own.folder, flex_mods.REFUSED)
            is_good &= summary.is_good
            texts.append(summary.text(f"{options.suite} {step}"))
            print(texts[-1], flush=True)
    if texts:
        (out / f"summary_{options.suite}.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
