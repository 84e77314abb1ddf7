"""The error rule for dq, dk and dv: at most twice the error of unfused PyTorch in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.spec.band import Band
from tests import cases

Attend = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v) -> (out, lse)
Loss = Callable[[Tensor, Tensor], Tensor]  # (out, lse) -> scalar


def weighted(dout: Tensor, dlse: Tensor | None = None) -> Loss:
    """A loss with these gradients of out and LSE. The LSE of rows without keys, -inf, does not count."""

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        total = (out * dout.to(out.dtype)).sum()
        if dlse is not None:
            total = total + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse.to(lse.dtype)).sum()
        return total

    return loss


def gradients(attend: Attend, inputs: tuple[Tensor, ...], loss: Loss) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(loss(*attend(*leaves)), leaves)


def largest(x: Tensor) -> float:
    """The largest magnitude; an empty tensor's is 0."""
    return x.abs().max().item() if x.numel() else 0.0


@dataclass(frozen=True)
class Expected:
    """The gradients in fp64, and those of unfused PyTorch in the dtype of the inputs."""

    exact: tuple[Tensor, ...]
    rough: tuple[Tensor, ...]

    @staticmethod
    def of(inputs: tuple[Tensor, ...], band: Band, loss: Loss, scale: float | None = None) -> Expected:
        wide = tuple(x.double() for x in inputs)
        exact = gradients(lambda q, k, v: reference.dense(q, k, v, band, scale), wide, loss)
        rough = gradients(lambda q, k, v: reference.dense_low_precision(q, k, v, band, scale), inputs, loss)
        return Expected(exact, rough)


def assert_gradients(
    attend: Attend, inputs: tuple[Tensor, ...], band: Band, loss: Loss, scale: float | None = None
) -> None:
    assert_close(gradients(attend, inputs, loss), inputs, Expected.of(inputs, band, loss, scale))


def assert_close(mine: tuple[Tensor, ...], inputs: tuple[Tensor, ...], expected: Expected) -> None:
    """Check dq, dk and dv."""
    exact, rough = expected.exact, expected.rough
    most = max(map(largest, exact))
    for name, x, value, oracle, low in zip("qkv", inputs, mine, exact, rough, strict=True):
        assert (value.shape, value.dtype) == (x.shape, x.dtype), f"d{name}: {value.shape} of {value.dtype}"
        assert torch.isfinite(low).all(), f"d{name}: the yardstick (unfused PyTorch) is not finite"
        if largest(oracle) <= 1e-12 * most:
            # Each query sees at most one key, so dS = P (dP - Δ) is 0, up to rounding of two sums.
            assert torch.isfinite(value).all() and largest(value) <= 1e-4 * most, f"d{name}: should be 0"
            continue
        cases.assert_error_within(f"d{name}", value, oracle, low)
