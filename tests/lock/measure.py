"""Compile the kernels of cases in separate processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

from cute_flash.jit.resources import Resources
from tests.lock.cases import AnyCase, compile_key, resources_of
from tests.lock.cubin import digest


class Result(NamedTuple):
    digest: str  # "" if the compilation failed
    seconds: float
    error: str = ""
    note: str = ""  # see `defects`


def defects(resources: Resources) -> str:
    """Defects that make a kernel slow: spilled registers, wgmma that ptxas serialises."""
    spills = f"{resources.spill_bytes} bytes spilled" if resources.spill_bytes else ""
    return " ".join(filter(None, (spills, *resources.serialised_wgmma)))


def measure(case: AnyCase) -> Result:
    """Compile the kernel of a case."""
    begin = time.perf_counter()
    try:
        resources = resources_of(compile_key(case))
        found, error, note = digest(resources.cubin), "", defects(resources)
    except Exception as raised:
        found, error, note = "", f"{type(raised).__name__}: {raised}", ""
    return Result(found, time.perf_counter() - begin, error, note)


def measure_all(groups: Sequence[Sequence[AnyCase]], jobs: int) -> Iterator[tuple[Sequence[AnyCase], Result]]:
    """`measure` for the first case of each group, as they finish, by `jobs` processes."""
    # Spawned processes, because a forked one could inherit locks of torch and the DSL that are never released.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(measure, group[0]): group for group in groups}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)
