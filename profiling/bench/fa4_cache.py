"""Compile the kernels of FlashAttention-4 in parallel, before a run calls it.

FlashAttention-4 compiles a kernel at its first call, which takes 5 to 15 s. If FA4_CACHE is set, it also keeps the
compiled kernels in a folder, from which other processes load them. Runs with user mods do not use the folder, because
the name of a file there may not tell apart two functions that differ only in captured values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from profiling.measure.shapes import DTYPES, Shape
from profiling.measure.workers import Pool, Task
from profiling.peers.directions import DIRECTIONS
from profiling.peers.flash_attention import FA4, FA4_CACHE
from profiling.peers.registry import registry

LIMIT_S = 120.0  # of the calls of one worker


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
    one, device = DIRECTIONS[direction], torch.device("cuda")
    for shape in shapes:
        with torch.no_grad():
            inputs = one.inputs(shape, DTYPES[dtype], device, 0, "normal")
            one.prepare(registry()[FA4], inputs, shape.causal)()
    torch.cuda.synchronize()


def fill(
    groups: Sequence[Sequence[Shape]], direction: str, dtype: str, jobs: int, make_pool: Callable[..., Pool] = Pool
) -> None:
    """Compile the kernels of each group of shapes, in `jobs` processes.

    A kernel that fails here is compiled by the run, which records its error.
    """
    tasks = [Task(first_calls, (group, direction, dtype)) for group in groups]
    with make_pool(jobs, {FA4_CACHE: "1"}, LIMIT_S) as pool:
        list(pool.run(tasks))
