"""Compile the kernels of FlashAttention-4 in parallel, before a run calls it.

FlashAttention-4 compiles a kernel at its first call, which takes 5 to 15 s. If ENABLED is set, it also keeps the
compiled kernels in a folder, from which other processes load them. Runs with user mods do not use the folder, because
the name of a file there may not tell apart two functions that differ only in captured values.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from profiling.measure.suites import DTYPES, Shape
from profiling.measure.workers import Pool, Task

NAME = "fa4"
ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
LIMIT_S = 120.0  # of the calls of one worker


def imported(name: str) -> Any:
    """A module of FlashAttention-4, which reads the environment when it is imported."""
    os.environ.setdefault(ENABLED, "1")
    return importlib.import_module(name)


def representatives(shapes: Sequence[Shape]) -> list[tuple[Shape, ...]]:
    """For each head dim, mask and number of heads, the shortest and the longest sequence, in a batch of 1."""

    def kernel(shape: Shape) -> tuple[int, bool, int, int]:
        return shape.head_dim, shape.causal, shape.heads, shape.heads_kv

    groups = []
    for _, group in groupby(sorted(shapes, key=lambda shape: (kernel(shape), shape.seqlen)), key=kernel):
        found = [replace(shape, batch=1) for shape in group]
        groups.append(tuple(dict.fromkeys((found[0], found[-1]))))
    return groups


def first_calls(shapes: Sequence[Shape], direction: str, dtype: str) -> None:
    """Call FlashAttention-4 once for each shape. Runs in a worker process."""
    # `profiling.peers.providers` imports this module.
    from profiling.peers.directions import DIRECTIONS
    from profiling.peers.providers import registry

    one, device = DIRECTIONS[direction], torch.device("cuda")
    for shape in shapes:
        with torch.no_grad():
            inputs = one.inputs(shape, DTYPES[dtype], device, 0, "normal")
            one.prepare(registry()[NAME], inputs, shape.causal)()
    torch.cuda.synchronize()


def fill(
    groups: Sequence[Sequence[Shape]],
    direction: str,
    dtype: str,
    jobs: int,
    progress: Callable[[str], None] = lambda line: None,
    make_pool: Callable[..., Pool] = Pool,
) -> None:
    """Compile the kernels of each group of shapes, in `jobs` processes.

    A kernel that fails here is compiled by the run, which records its error.
    """
    tasks = [Task(first_calls, (group, direction, dtype)) for group in groups]
    with make_pool(jobs, {ENABLED: "1"}, LIMIT_S) as pool:
        for outcome in pool.run(tasks):
            shape = groups[outcome.index][0]
            progress(f"D={shape.head_dim} {shape.mask}: {outcome.error or 'compiled'}")
