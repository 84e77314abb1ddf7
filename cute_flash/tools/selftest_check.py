"""Runs a call of `cute-flash selftest`, and compares out, lse and all gradients with the oracle."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.runtime.rng import draw_seed, next_seed
from cute_flash.spec.family import use_kernels
from cute_flash.tools.selftest_calls import Call, Tensors
from cute_flash.tools.selftest_oracle import attention

SEED = 9
RIGHT, WRONG, REFUSED, FAILED = "right", "WRONG", "refused", "FAILED"
# A result may have this many times the error of the oracle with rounded intermediates: the mean, the maximum, and both
# of few numbers, whose rounding errors do not average out.
TIMES_MEAN, TIMES_MAX, TIMES_FEW, FEW = 2.0, 3.0, 8.0, 5000
FEW_SUMS = 600  # gradients of fewer numbers are sums over many scores


@dataclass(frozen=True)
class Floor:
    """An error that is always allowed: relative to the result, and absolute, for sums that cancel."""

    relative: float
    mean: float
    largest: float
    sums: float


FLOORS = {
    torch.bfloat16: Floor(2.0**-8, 1e-5, 1e-4, 5e-3),
    torch.float16: Floor(2.0**-11, 1e-5, 1e-4, 5e-3),
    torch.float32: Floor(2e-6, 2e-6, 4e-5, 4e-5),
}
LSE_FLOOR = Floor(1e-5, 5e-5, 5e-5, 5e-5)  # of 16-bit calls


@dataclass(frozen=True)
class Outcome:
    """The verdict about a call, and its largest error relative to the allowed error."""

    call: str
    family: str  # "": the default of the GPU
    verdict: str
    ratio: float | None = None  # None: not finite, or nothing was compared
    result: str = ""  # the result with this error: out, lse, dq, ...
    exception: str = ""  # its type
    message: str = ""

    @property
    def is_right(self) -> bool:
        return self.verdict in (RIGHT, REFUSED)


def check(call: Call, family: str, device: str) -> Outcome:
    """Run a call with kernels of a family and compare its results with the oracle."""
    try:
        return _check(call, family, device)
    except Exception as error:
        verdict = REFUSED if isinstance(error, UnsupportedError) else FAILED
        return Outcome(call.name, family, verdict, exception=type(error).__name__, message=str(error))


def _check(call: Call, family: str, device: str) -> Outcome:
    with use_kernels(family):
        rng = reset_rng(device)
        computed = run(call, device)
        if call.options.get("deterministic") and not _is_equal(computed, run(call, device)):
            return Outcome(call.name, family, WRONG, message="deterministic=True: a second call has other bits")

    def oracle(dtype: torch.dtype, rounded: torch.dtype | None = None) -> Tensors:
        return results(call, inputs(call, device, dtype), lambda x: by_definition(call, x, rng, rounded))

    exact = oracle(torch.float64)
    rough = oracle(torch.float32) if call.dtype == torch.float32 else oracle(torch.float64, call.dtype)
    ratios = {name: error_ratio(name, value, exact[name], rough[name], call) for name, value in computed.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    verdict, ratio = RIGHT if ratios[worst] <= 1 else WRONG, ratios[worst]
    return Outcome(call.name, family, verdict, ratio if math.isfinite(ratio) else None, worst)


def run(call: Call, device: str) -> Tensors:
    """The results of the call. New memory holds NaN, so that elements that no kernel writes are wrong."""
    with poisoned_memory():
        return results(call, inputs(call, device), lambda x: call.form.attend(call, x))


def inputs(call: Call, device: str, dtype: torch.dtype | None = None) -> Tensors:
    """The tensors of the call; for the oracle, converted to one dtype."""
    tensors = call.tensors(device).items()
    return {name: x.to(dtype or x.dtype).requires_grad_(call.form.has_gradients) for name, x in tensors}


def results(call: Call, x: Tensors, attend: Callable[[Tensors], tuple[Tensor, Tensor]]) -> Tensors:
    """out, lse and, if the call has gradients, those of all inputs."""
    out, lse = attend(x)
    values = {"out": out.detach(), "lse": lse.detach()}
    if not call.form.has_gradients:
        return values
    generator = torch.Generator().manual_seed(SEED)
    loss = torch.zeros((), dtype=torch.float64, device=out.device)
    for y in (out, lse) if call.has_dlse else (out,):
        gradient = torch.randn(y.shape, generator=generator).to(call.dtype)
        # Rows without keys have an LSE of -inf, and no gradient.
        loss = loss + (y.masked_fill(y == -torch.inf, 0.0) * gradient.to(y.device, y.dtype)).sum()
    gradients = torch.autograd.grad(loss, list(x.values()))
    return values | {f"d{name}": gradient for name, gradient in zip(x, gradients)}


def by_definition(call: Call, x: Tensors, rng: tuple[int, int], rounded: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The oracle, sequence by sequence."""
    a = {**call.keywords(x), "rng": rng}
    parts = [attention(q, k, v, b, a, rounded) for b, (q, k, v) in enumerate(call.form.split(call, x))]
    return call.form.join([out for out, _ in parts], [lse for _, lse in parts])


def error_ratio(name: str, value: Tensor, exact: Tensor, rough: Tensor, call: Call) -> float:
    """The error of a result relative to the allowed error: at most 1 if the result is right."""
    empty = exact == -torch.inf
    if value.shape != exact.shape or not torch.equal(value == -torch.inf, empty):
        return math.inf
    value, exact, rough = (y.double().masked_fill(empty, 0.0) for y in (value, exact, rough))
    if not bool(value.isfinite().all()):
        return math.inf
    size, error, rounding = exact.abs(), (value - exact).abs(), (rough - exact).abs()
    floor = LSE_FLOOR if name == "lse" and call.dtype != torch.float32 else FLOORS[call.dtype]
    is_few, is_sums, ratios = value.numel() < FEW, value.numel() < FEW_SUMS and name not in ("out", "lse"), []
    for measure, times, absolute in ((torch.mean, TIMES_MEAN, floor.mean), (torch.max, TIMES_MAX, floor.largest)):
        times, absolute = TIMES_FEW if is_few else times, floor.sums if is_sums else absolute
        ratios.append(float(measure(error) / (floor.relative * measure(size) + times * measure(rounding) + absolute)))
    return max(ratios)


def reset_rng(device: str) -> tuple[int, int]:
    """Seed torch's generators, and return the pair (seed, offset) of the next call with dropout."""
    torch.manual_seed(SEED)
    place = torch.empty(0, device=device)
    seed, offset = (next_seed(place.get_device()) if place.is_cuda else draw_seed(place.device)).tolist()
    torch.manual_seed(SEED)
    return seed, offset


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN, as torch's deterministic mode does.

    With `warn_only`, the mode does not change the kernels of cute_flash.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            # About operations of torch that have no deterministic algorithm.
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _is_equal(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)
