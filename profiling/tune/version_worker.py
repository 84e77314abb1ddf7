"""The process of one version in `profiling versions`: it prepares the call of a cell, and times it on request.

`cute_flash` is that of the version, because its folder comes first in the search path of the process; `profiling` is
that of the command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cute_flash
from cute_flash.jit import compile as compiling
from cute_flash.planning.launch import LaunchKey
from profiling.measure.launches import needed_kernels
from profiling.measure.timing import (
    Batch,
    GraphTimer,
    TimedCall,
    Timer,
    WallTimer,
    time_batch,
    unusable_if_lost,
    warm_up,
)
from profiling.peers.cute_flash import OPTIONS
from profiling.peers.peer import gradients_of

# About so many elements of each result are compared between versions.
COMPARED = 1 << 20


@dataclass(frozen=True)
class Cell:
    """A call of `attn` in one direction."""

    direction: str  # "fwd" or "bwd"
    feature: str  # of `features.OPTIONS`
    head_dim: int
    mask: str  # "full" or "causal"
    seqlen: int
    batch: int
    heads: int

    @property
    def name(self) -> str:
        return f"{self.direction} {self.feature} d{self.head_dim} {self.mask} s{self.seqlen}"


def _precompile_all() -> Callable[[Sequence[LaunchKey], int], Iterable[bool]]:
    """The function of the version. Earlier versions have it in `jit.compile`."""
    if hasattr(compiling, "precompile_all"):
        return compiling.precompile_all
    from cute_flash.jit.kernels import precompile_all

    return precompile_all


class VersionWorker:
    """The requests that the process answers. `folder`: of the version; None: whatever was imported is measured."""

    def __init__(self, timer: Timer, device: torch.device, folder: Path | None = None) -> None:
        self.timer, self.device, self.folder = timer, device, folder
        self._timed_call: TimedCall | None = None
        self._batch: Batch | None = None

    def check_imports(self) -> None:
        """Raise an error if a module of `cute_flash` is not that of the version.

        An editable installation provides modules that the version does not have.
        """
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if self.folder is not None and file is not None and name.partition(".")[0] == "cute_flash":
                if self.folder not in Path(file).resolve().parents:
                    raise ImportError(f"{name} was imported from {file}, because the version does not have it")

    def compile(self, cells: Sequence[Cell], jobs: int) -> tuple[int, int]:
        """Compile the kernels of all cells. Return how many kernels there are, and how many were compiled now.

        The others were in the cache. A cell that fails is skipped; `prepare` reports its error.
        """
        keys = needed_kernels(lambda cell=cell: self._make(cell, 0).call() for cell in cells)  # type: ignore[misc]
        self.release()
        self.check_imports()
        return len(keys), sum(_precompile_all()(keys, jobs))

    def prepare(self, cell: Cell, seed: int, budget_ms: float) -> list[Tensor]:
        """Make the call and the batch that `time` runs; return some elements of each result."""
        self.release()
        with self.timer.stream():
            timed_call = self._make(cell, seed)
            torch.manual_seed(seed)
            results = timed_call.call()
            compared = [some_elements(x) for x in (results if isinstance(results, tuple) else (results,))]
        self.check_imports()
        self._batch, self._timed_call = warm_up(timed_call, self.timer, budget_ms), timed_call
        return compared

    def time(self) -> tuple[int, float]:
        """Calls in a batch, and milliseconds of one call."""
        assert self._timed_call is not None and self._batch is not None, "prepare comes first"
        return self._batch.calls, time_batch(self._timed_call, self._batch, self.timer)

    def release(self) -> None:
        """Free the memory of the last cell for the processes of other versions."""
        self._timed_call = self._batch = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _make(self, cell: Cell, seed: int) -> TimedCall:
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
        inputs = [torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16) for _ in range(3)]
        options = OPTIONS[cell.feature](cell.heads, cell.seqlen, self.device)
        forward = partial(cute_flash.attn, causal=cell.mask == "causal", layout="bshd", **options)
        if cell.direction == "fwd":
            return TimedCall(torch.no_grad()(partial(forward, *inputs)))
        torch.manual_seed(seed)  # of the dropout mask
        return gradients_of(forward, inputs)


def some_elements(x: Tensor) -> Tensor:
    """About `COMPARED` elements. The step is odd, so that it visits every column of a power of two."""
    flat = x.detach().flatten()
    return flat[:: flat.numel() // COMPARED | 1].float().cpu()


@cache
def _worker(packages: Path) -> VersionWorker:
    if not torch.cuda.is_available():
        return VersionWorker(WallTimer(), torch.device("cpu"), packages)
    return VersionWorker(GraphTimer(), torch.device("cuda"), packages)


def request(packages: Path, name: str, *arguments: Any) -> Any:
    """Call a method of the process's `VersionWorker`; `packages`: the folder of the version."""
    worker = _worker(packages)
    try:
        with unusable_if_lost(worker.timer):
            return getattr(worker, name)(*arguments)
    except Exception:
        worker.release()
        raise
