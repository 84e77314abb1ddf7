"""How far each provider is from exact attention, on the inputs that are timed.

The oracle is fp64, computed on the same device for a sample: one batch, two heads, up to 1024 rows in blocks
that cover the beginning, the middle and the end, against all their keys. Its yardstick is the same maths as
unfused PyTorch does it in the input's precision: an output more than twice as far from the oracle as that, or
as the reference peer's, is wrong. What the sample leaves out is covered by comparing whole outputs with that
peer's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.band import Band, ceil_div
from profiling.suites import Shape

BLOCK_ROWS, MAX_BLOCKS = 256, 4
MAX_TIMES = 2.0
# N(0, 1) + N(0, 100) · Bernoulli(0.001): the outliers of the FlashAttention-3 paper.
OUTLIER_STD, OUTLIER_RATE = 10.0, 0.001
DISTRIBUTIONS = ("normal", "outliers")


def draw(
    shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, distribution: str = "normal"
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, the same for the same seed on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)

    def tensor(heads: int) -> Tensor:
        size = (shape.batch, heads, shape.seqlen, shape.head_dim)
        x = torch.randn(size, generator=generator, device=device)
        if distribution == "outliers":
            hit = torch.rand(size, generator=generator, device=device) < OUTLIER_RATE
            x += OUTLIER_STD * torch.randn(size, generator=generator, device=device) * hit
        return x.to(dtype)

    return tensor(shape.heads), tensor(shape.heads_kv), tensor(shape.heads_kv)


@dataclass(frozen=True)
class Errors:
    """Distance from the oracle on the sample; None where it is not a number."""

    relative: float | None  # ‖out - exact‖ / ‖exact‖, Frobenius
    max_abs: float | None


@dataclass(frozen=True)
class Accuracy:
    relative: float | None
    max_abs: float | None
    non_finite: int  # entries of the whole output
    distance: float | None  # from the reference peer's output, over all of it; None without that peer
    is_wrong: bool


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _blocks(seqlen: int) -> list[slice]:
    rows = min(BLOCK_ROWS, seqlen)
    count = min(MAX_BLOCKS, ceil_div(seqlen, rows))
    starts = [round(i * (seqlen - rows) / max(count - 1, 1)) for i in range(count)]
    return [slice(start, start + rows) for start in starts]


class Oracle:
    """Exact attention on the sample of one problem."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        heads, group = q.shape[1], q.shape[1] // k.shape[1]
        # The last batch and the last head: where a wrong stride or a missing tail shows.
        self.batch = slice(q.shape[0] - 1, None)
        self.heads = [0, heads - 1] if heads > 1 else [0]
        self.blocks = _blocks(q.shape[2])
        kv_heads = [head // group for head in self.heads]
        K, V = (x[self.batch][:, kv_heads] for x in (k, v))
        exact, rough = [], []
        for rows, Q in zip(self.blocks, self._pick(q), strict=True):
            # Causal rows up to r are a causal problem on the keys up to r, aligned to the bottom right.
            keys = slice(0, rows.stop if causal else None)
            problem = (Q, K[:, :, keys], V[:, :, keys], Band.of(causal, (None, None)))
            exact.append(reference.dense(*problem)[0])
            rough.append(reference.dense_low_precision(*problem)[0])
        self.exact = torch.stack(exact)
        self.yardstick = self._distance(torch.stack(rough))

    def _pick(self, x: Tensor) -> list[Tensor]:
        return [x[self.batch][:, self.heads, rows] for rows in self.blocks]

    def _distance(self, sample: Tensor) -> Errors:
        error = sample.double() - self.exact
        norm = torch.linalg.vector_norm
        return Errors(_number(norm(error) / norm(self.exact)), _number(error.abs().max()))

    def errors(self, out: Tensor) -> Errors:
        return self._distance(torch.stack(self._pick(out)))

    def judge(self, out: Tensor, peer: Tensor | None = None) -> Accuracy:
        """The errors of an output (B, H, S, D), and whether it is wrong; `peer` is the reference's output."""
        errors = self.errors(out)
        rivals = [self.yardstick] if peer is None else [self.yardstick, self.errors(peer)]
        non_finite = int((~torch.isfinite(out)).sum())
        distance = None if peer is None else relative_distance(out, peer)
        is_right = non_finite == 0 and self._is_close(errors, rivals, out.dtype)
        if distance is not None:
            # The triangle inequality, with room: a larger distance lies outside the sample.
            is_right = is_right and distance <= MAX_TIMES * (
                _bound(errors.relative) + _bound(rivals[-1].relative)
            )
        return Accuracy(errors.relative, errors.max_abs, non_finite, distance, not is_right)

    def _is_close(self, errors: Errors, rivals: Sequence[Errors], dtype: torch.dtype) -> bool:
        """Within twice the error of the yardstick, and of the reference peer where there is one."""
        # Even a perfect kernel rounds outputs that others may happen to hit exactly.
        eps, largest = torch.finfo(dtype).eps, float(self.exact.abs().max())
        relative = max(MAX_TIMES * min(_bound(rival.relative) for rival in rivals), eps / 4)
        max_abs = MAX_TIMES * _bound(self.yardstick.max_abs) + eps / 2 * largest
        return _bound(errors.relative) <= relative and _bound(errors.max_abs) <= max_abs


def _bound(error: float | None) -> float:
    return math.inf if error is None else error


def relative_distance(out: Tensor, other: Tensor) -> float | None:
    norm = torch.linalg.vector_norm
    return _number(norm(out.float() - other.float()) / norm(other.float()))


def poison(like: Tensor) -> None:
    """Leave NaN in memory that the next output of this size will likely get: an unwritten entry must show."""
    torch.full_like(like, torch.nan)
