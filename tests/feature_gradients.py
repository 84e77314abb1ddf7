"""The error rules for calls with score features. out and LSE follow the rule of `tests.cases`.

dq, dk and dv follow the rule of `tests.gradients` with a second yardstick: the gradients of the CPU path for the same
out and LSE. Like a kernel, the CPU path computes Δ = rowsum(dO ∘ O) from a 16-bit output. Unfused PyTorch does not, and
the difference shows in rows that see few keys.

Gradients of slopes and sinks are sums over all queries and keys, in which the error of Δ adds up. They are compared
with the CPU path, with a tolerance smaller than its distance from the oracle.

Everything is computed on the device of the tensors, with few synchronizations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_flash import reference
from tests import cases
from tests.combinations import Combination, Outputs, VarlenCombination, results

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
    sizes = dict(zip(exact, cases.together(*map(_largest, exact.values())), strict=True))
    most = max(sizes[name] for name in "qkv")
    for name, x in tensors.items():
        value, oracle = mine[name], exact[name]
        assert (value.shape, value.dtype) == (x.shape, x.dtype), f"d{name}: {value.shape} of {value.dtype}"
        errors = [(y[name].double() - oracle).abs() for y in (rough, fused)]
        not_finite = ((~y.isfinite()).sum() for y in (value, *errors))
        wrong, *no_measure = cases.together(*not_finite)
        assert wrong == 0, f"d{name}: not finite"
        assert not any(no_measure), f"d{name}: a yardstick (unfused PyTorch or the CPU path) is not finite"
        if name in ("alibi", "sinks"):
            noise = _noise(name, tensors, case.features.get("dropout", 0.0))
            _assert_sums_agree(name, value, fused[name], oracle, noise)
        elif sizes[name] <= 1e-12 * most:
            found, yardstick = cases.together(_largest(value), _largest(errors[1]))
            assert found <= 1e-4 * most + 2 * yardstick, f"d{name}: should be 0"
        else:
            cases.assert_error_within(f"d{name}", value, oracle, oracle + errors[0] + errors[1])
    return mine


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude; an empty tensor's is 0."""
    return x.abs().max() if x.numel() else x.new_zeros(())


def _noise(name: str, tensors: dict[str, Tensor], dropout: float) -> float:
    """The fp32 rounding error of a slope's gradient whose terms cancel, as in rows that see one key.

    A term is P (dP - Δ) times the distance, where the P of a row sum to 1, and dP is a sum over the width of v of
    products of order 1, scaled by dropout.
    """
    q, k = tensors["q"], tensors["k"]
    if name == "sinks":
        return 0.0
    size = tensors["v"].shape[-1] ** 0.5 / (1.0 - dropout)
    rows = q.numel() // (q.shape[-1] * q.shape[1])
    longest = max(x.shape[2 if x.dim() == 4 else 0] for x in (q, k))
    return FP32_NOISE * size * longest * rows**0.5


def _assert_sums_agree(name: str, value: Tensor, fused: Tensor, oracle: Tensor, noise: float) -> None:
    if not value.numel():
        return
    found, yardstick, size = cases.together(
        *(x.double().square().mean().sqrt() for x in (value - fused, fused - oracle, oracle))
    )
    allowed = PER_HEAD_YARDSTICK * yardstick + PER_HEAD_FLOOR * size + noise + 1e-4
    assert found <= allowed, f"d{name}: {found:.3e} from the CPU path's, allowed {allowed:.3e}"
