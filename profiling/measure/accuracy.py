"""The error of each peer against exact attention, on the inputs that are timed.

An oracle holds exact results for a sample of the outputs, and a yardstick: the error of unfused PyTorch in the
input's precision. An output is wrong if its error is more than twice the yardstick, or twice the
error of the reference peer. Outputs outside the sample are compared with those of the reference peer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from profiling.measure.shapes import Shape

MAX_TIMES = 2.0
# N(0, 1) + N(0, 100) · Bernoulli(0.001): the outliers of the FlashAttention-3 paper.
OUTLIER_STD, OUTLIER_RATE = 10.0, 0.001
# Added to the seed of the inputs; without it dout would be equal to q.
DOUT_SEED = 1_000_003
DISTRIBUTIONS = ("normal", "outliers")
# Degrees of freedom of Student's t-distribution: the fewest with a finite variance.
TAIL_DEGREES = 3


def relative_difference(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest ‖a - b‖ / ‖b‖ of pairs of tensors; infinite for NaN."""
    each = [((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in zip(mine, theirs, strict=True)]
    return max(x if x == x else math.inf for x in each)


def draw(distribution: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """An fp32 tensor of independent entries, on the generator's device.

    normal: N(0, 1). outliers: N(0, 1) + N(0, 100) Bernoulli(0.001), as in the FlashAttention-3 paper. long-tailed:
    Student's t with 3 degrees of freedom.
    """
    normal = partial(torch.randn, size, generator=generator, device=generator.device)
    x = normal()
    if distribution == "outliers":
        hit = torch.rand(size, generator=generator, device=generator.device) < OUTLIER_RATE
        x += OUTLIER_STD * normal() * hit
    elif distribution == "long-tailed":
        x /= sum(normal().square() for _ in range(TAIL_DEGREES)).div(TAIL_DEGREES).sqrt()  # type: ignore[union-attr]
    elif distribution != "normal":
        raise ValueError(f"distribution {distribution!r}: choose from normal, outliers, long-tailed")
    return x


def random_inputs(
    shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, distribution: str = "normal"
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; equal for equal seeds on the same type of device."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = [(shape.batch, heads, shape.seqlen, shape.head_dim) for heads in (shape.heads, shape.heads_kv)]
    q, k, v = (draw(distribution, size, generator).to(dtype) for size in (sizes[0], sizes[1], sizes[1]))
    return q, k, v


def random_dout(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """The gradient of the output: standard normal for every distribution of the inputs."""
    generator = torch.Generator(device).manual_seed(seed + DOUT_SEED)
    size = (shape.batch, shape.heads, shape.seqlen, shape.head_dim)
    return torch.randn(size, generator=generator, device=device).to(dtype)


@dataclass(frozen=True)
class Errors:
    """The error against the oracle on the sample; None if it is not finite."""

    relative: float | None  # ‖out - exact‖ / ‖exact‖, Frobenius
    max_abs: float | None


@dataclass(frozen=True)
class Accuracy:
    relative: float | None
    max_abs: float | None
    non_finite: int  # entries of the whole output
    distance: float | None  # from the whole output of the reference peer; None without that peer
    is_wrong: bool


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Oracle:
    """The exact values of a sample of one output."""

    pick: Callable[[Tensor], Tensor]  # the sample of a whole output
    exact: Tensor
    yardstick: Errors

    @staticmethod
    def of(pick: Callable[[Tensor], Tensor], exact: Tensor, rough: Tensor) -> Oracle:
        """`rough`: the same sample by unfused PyTorch in the input's precision."""
        return Oracle(pick, exact, errors_of(rough, exact))

    def errors(self, out: Tensor) -> Errors:
        return errors_of(self.pick(out), self.exact)

    def judge(self, out: Tensor, peer: Tensor | None = None) -> Accuracy:
        """The errors of an output (B, H, S, D), and whether it is wrong; `peer` is the reference's output."""
        errors = self.errors(out)
        rivals = [self.yardstick] if peer is None else [self.yardstick, self.errors(peer)]
        non_finite = int((~torch.isfinite(out)).sum())
        distance = None if peer is None else relative_distance(out, peer)
        is_right = non_finite == 0 and self._is_close(errors, rivals, out.dtype)
        if distance is not None:
            # By the triangle inequality, a larger distance means an error outside the sample.
            is_right = is_right and distance <= MAX_TIMES * (_bound(errors.relative) + _bound(rivals[-1].relative))
        return Accuracy(errors.relative, errors.max_abs, non_finite, distance, not is_right)

    def _is_close(self, errors: Errors, rivals: Sequence[Errors], dtype: torch.dtype) -> bool:
        """Whether the error is within twice the yardstick, and within twice that of the reference peer."""
        # Even a perfect kernel rounds its outputs.
        eps, largest = torch.finfo(dtype).eps, float(self.exact.abs().max())
        relative = max(MAX_TIMES * min(_bound(rival.relative) for rival in rivals), eps / 4)
        max_abs = MAX_TIMES * _bound(self.yardstick.max_abs) + eps / 2 * largest
        return _bound(errors.relative) <= relative and _bound(errors.max_abs) <= max_abs


def errors_of(out: Tensor, exact: Tensor) -> Errors:
    """The errors of a result against fp64."""
    error = out.double() - exact
    norm = torch.linalg.vector_norm
    return Errors(_number(norm(error) / norm(exact)), _number(error.abs().max()))


def _bound(error: float | None) -> float:
    return math.inf if error is None else error


def relative_distance(out: Tensor, other: Tensor) -> float | None:
    norm = torch.linalg.vector_norm
    return _number(norm(out.float() - other.float()) / norm(other.float()))


def poison(*like: Tensor) -> None:
    """Fill memory that the allocator will likely reuse for outputs of these sizes with NaN.

    An output element that a kernel does not write is then NaN.
    """
    # All outputs are kept until the end, so that each has its own memory.
    _tensors = [torch.full_like(x, torch.nan) for x in like]


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Fill tensors that torch allocates in the block with NaN, so that elements that are not written stay NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
