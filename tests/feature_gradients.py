"""The error rules of `tests.cases` and `tests.gradients` for calls with score features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_flash import reference
from tests import cases
from tests.combinations import Combination, Outputs, VarlenCombination, results
from tests.gradients import SumTolerance, assert_like_cpu_path

# Tolerances for slopes and sinks: factors of the CPU path's distance from the oracle, and of the gradient's size.
PER_HEAD_YARDSTICK, PER_HEAD_FLOOR = 0.1, 2e-3
FP32_NOISE = 2.0**-23

AnyCombination = Combination | VarlenCombination
Attend = Callable[[dict[str, Tensor]], Outputs]  # leaves -> (out, lse)


def weights(case: AnyCombination, device: str, with_lse: bool) -> Outputs:
    """The gradients of out and of the LSE; the latter are 0 unless `with_lse`."""
    problem = case.problem
    dout, dlse = case.weights(torch.Generator().manual_seed(problem.seqlen_q + problem.seqlen_k))
    return dout.to(device), dlse.to(device) * with_lse


def by_cpu_path(
    case: AnyCombination, tensors: dict[str, Tensor], outs: Outputs, douts: Outputs, scale: float | None
) -> dict[str, Tensor]:
    """The gradients that the CPU path computes from these (out, lse), on the device of the tensors."""
    x = {name: tensor.detach() for name, tensor in tensors.items()}
    (out, lse), (dout, dlse) = outs, douts
    qkv = x["q"], x["k"], x["v"]
    *grads, others = reference.backward(dout.to(out.dtype), dlse, *qkv, out, lse, case.args(x, scale))
    named = dict(zip(("q", "k", "v", "alibi", "sinks"), (*grads, *others), strict=False))
    return {name: named[name] for name in tensors}


def assert_outputs(outs: Outputs, exact: Outputs, rough: Outputs) -> None:
    cases.assert_lse_close(outs[1], exact[1])
    cases.assert_error_within("out", outs[0], exact[0], rough[0])
    empty = (exact[0] == 0).all(-1)
    assert (outs[0][empty] == 0).all(), "out: rows that see no key, and padding, must be exactly 0"


def assert_feature_gradients(
    attend: Attend,
    case: AnyCombination,
    tensors: dict[str, Tensor],
    douts: Outputs,
    scale: float | None = None,
    second_yardstick: bool = True,
) -> dict[str, Tensor]:
    """Check out, LSE and all gradients of `attend`, and return the gradients of q, k, v, alibi and sinks.

    Without `second_yardstick`, dq, dk and dv follow the rule of `tests.gradients`.
    """
    wide = {name: x.double() for name, x in tensors.items()}
    outs, mine = results(attend, tensors, douts)
    exact_outs, exact = results(lambda x: case.dense(reference.dense, x, scale), wide, douts)
    rough_outs, rough = results(lambda x: case.dense(reference.dense_low_precision, x, scale), tensors, douts)
    assert_outputs(outs, exact_outs, rough_outs)
    fused = exact
    if second_yardstick:
        with torch.no_grad():
            fused = by_cpu_path(case, tensors, outs, douts, scale)
    noise = _noise(tensors, case.features.get("dropout", 0.0))

    def tolerance(name: str) -> SumTolerance:
        return SumTolerance(PER_HEAD_YARDSTICK, PER_HEAD_FLOOR, 1e-4 + (noise if name == "alibi" else 0.0))

    assert_like_cpu_path(mine, tensors, exact, rough, fused, tolerance)
    return mine


def _noise(tensors: dict[str, Tensor], dropout: float) -> float:
    """The fp32 rounding error of a slope's gradient whose terms cancel, as in rows that see one key.

    A term is P (dP - Δ) times the distance, where the P of a row sum to 1, and dP is a sum over the width of v of
    products of order 1, scaled by dropout.
    """
    q, k = tensors["q"], tensors["k"]
    size = tensors["v"].shape[-1] ** 0.5 / (1.0 - dropout)
    rows = q.numel() // (q.shape[-1] * q.shape[1])
    longest = max(x.shape[2 if x.dim() == 4 else 0] for x in (q, k))
    return FP32_NOISE * size * longest * rows**0.5
