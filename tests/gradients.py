"""The error rules for gradients.

The error of dq, dk and dv may be at most twice the error of unfused PyTorch in the same dtype (`assert_close`).

With features, there is a second yardstick: the gradients of the CPU path for the same out and LSE
(`assert_like_cpu_path`). Like a kernel, the CPU path computes Δ = rowsum(dO ∘ O) from a 16-bit output. Unfused PyTorch
does not, and the difference shows in rows that see few keys. Gradients of slopes, sinks, a bias and captured tensors
are sums, in which the error of Δ adds up. They are compared with the CPU path, with a tolerance smaller than its
distance from the oracle.
"""

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


def loss_of(outs: tuple[Tensor, Tensor], douts: tuple[Tensor, Tensor | None]) -> Tensor:
    """The loss with the gradients `douts` of (out, LSE). The LSE of rows without keys, -inf, does not count."""
    (out, lse), (dout, dlse) = outs, douts
    total = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        total = total + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse.to(lse.dtype)).sum()
    return total


def weighted(dout: Tensor, dlse: Tensor | None = None) -> Loss:
    return lambda out, lse: loss_of((out, lse), (dout, dlse))


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


@dataclass(frozen=True)
class SumTolerance:
    """How far a gradient that is a sum may be from the CPU path's, as root mean squares."""

    yardstick: float  # share of the CPU path's distance from the oracle
    floor: float  # share of the gradient's size
    absolute: float


Gradients = dict[str, Tensor]


def assert_like_cpu_path(
    mine: Gradients, tensors: Gradients, exact: Gradients, rough: Gradients, fused: Gradients,
    tolerance: Callable[[str], SumTolerance],
) -> None:  # fmt: skip
    """Check gradients by name. `fused` are the CPU path's; `tolerance` is of gradients other than dq, dk and dv.

    Everything is computed on the device of the tensors, with few synchronizations.
    """
    sizes = dict(zip(exact, cases.together(*map(_largest, exact.values())), strict=True))
    most = max(sizes[name] for name in "qkv")
    for name, x in tensors.items():
        value, oracle = mine[name], exact[name]
        assert (value.shape, value.dtype) == (x.shape, x.dtype), f"d{name}: {value.shape} of {value.dtype}"
        measures = (rough, fused) if name in "qkv" else (fused,)
        errors = [(y[name].double() - oracle).abs() for y in measures]
        wrong, *no_measure = cases.together(*((~y.isfinite()).sum() for y in (value, *errors)))
        assert wrong == 0, f"d{name}: not finite"
        assert not any(no_measure), f"d{name}: a yardstick (unfused PyTorch or the CPU path) is not finite"
        if name not in "qkv":
            _assert_sums_agree(name, value, fused[name], oracle, tolerance(name))
        elif sizes[name] <= 1e-12 * most:
            found, yardstick = cases.together(_largest(value), _largest(errors[1]))
            assert found <= 1e-4 * most + 2 * yardstick, f"d{name}: should be 0"
        else:
            cases.assert_error_within(f"d{name}", value, oracle, oracle + errors[0] + errors[1])


def _largest(x: Tensor) -> Tensor:
    return x.abs().max() if x.numel() else x.new_zeros(())


def _assert_sums_agree(name: str, value: Tensor, fused: Tensor, oracle: Tensor, tolerance: SumTolerance) -> None:
    if not value.numel():
        return
    found, yardstick, size = cases.together(
        *(x.double().square().mean().sqrt() for x in (value - fused, fused - oracle, oracle))
    )
    allowed = tolerance.yardstick * yardstick + tolerance.floor * size + tolerance.absolute
    assert found <= allowed, f"d{name}: {found:.3e} from the CPU path's, allowed {allowed:.3e}"
