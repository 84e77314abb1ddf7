"""The benchmark of `cute-flash selftest`: a few calls beside the backends of torch's SDPA, in interleaved rounds."""

from __future__ import annotations

import math
import random
import statistics
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cute_flash.api import attn

BATCH, LENGTH = 4, 4096
ROUNDS, SAMPLE_MS = 15, 20.0
Run = Callable[[], object]


def _cute_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return attn(q, k, v, causal=causal)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


OURS = "cute_flash"
LIBRARIES: dict[str, Callable[..., Tensor]] = {
    OURS: _cute_flash,
    "SDPA flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
}


@dataclass(frozen=True)
class Cell:
    """A shape, and the pass to time."""

    head_dim: int
    causal: bool
    is_backward: bool

    @property
    def name(self) -> str:
        mask, direction = "causal" if self.causal else "full", "backward" if self.is_backward else "forward"
        return f"d{self.head_dim} {mask} {direction}"

    @property
    def heads(self) -> int:
        return 2048 // self.head_dim

    @property
    def flops(self) -> float:
        """Of the visible scores: two products forward, five backward."""
        scores = BATCH * self.heads * LENGTH**2 * (0.5 if self.causal else 1.0)
        return (10 if self.is_backward else 4) * self.head_dim * scores

    def run_of(self, library: str) -> Run:
        """A function that computes the cell once."""
        size = BATCH, self.heads, LENGTH, self.head_dim
        q, k, v, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        forward = partial(LIBRARIES[library], q, k, v, self.causal)
        if not self.is_backward:
            return forward
        leaves = tuple(x.requires_grad_() for x in (q, k, v))
        return partial(torch.autograd.grad, forward(), leaves, dout, retain_graph=True)


CELLS = tuple(
    Cell(head_dim, causal, is_backward)
    for is_backward in (False, True)
    for head_dim, causal in ((64, True), (128, True), (128, False))
)


@dataclass(frozen=True)
class Timing:
    """The median time of a call by each library that computes the cell, in rounds that interleave the libraries."""

    cell: str
    milliseconds: dict[str, float]
    tflops: dict[str, float]
    spread: dict[str, float]  # (longest - shortest) / median of the rounds

    def ratio(self, library: str) -> float | None:
        """The speed of cute_flash divided by that of a library; None if one of them did not compute the cell."""
        ours, other = self.milliseconds.get(OURS), self.milliseconds.get(library)
        return None if ours is None or other is None else other / ours


def measure(cell: Cell) -> Timing:
    """Time a cell. A library that raises an error is left out: not every backend of SDPA supports every GPU."""
    runs: dict[str, tuple[Run, int]] = {}
    samples: dict[str, list[float]] = {}
    for library in LIBRARIES:
        # SDPA warns of the reason why a backend cannot be used.
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            run = cell.run_of(library)
            run()
            runs[library] = run, max(1, math.ceil(SAMPLE_MS / _milliseconds(run, 3)))
            samples[library] = []
    for _ in range(ROUNDS):
        for library in random.sample(list(runs), len(runs)):
            run, calls = runs[library]
            for _ in range(calls // 2):
                run()
            samples[library].append(_milliseconds(run, calls))
    medians = {library: statistics.median(x) for library, x in samples.items()}
    return Timing(
        cell.name,
        medians,
        {library: cell.flops / median / 1e9 for library, median in medians.items()},
        {library: (max(x) - min(x)) / medians[library] for library, x in samples.items()},
    )


def _milliseconds(run: Run, calls: int) -> float:
    """The GPU time of one call of several in sequence."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls
