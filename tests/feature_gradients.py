"""The rule for gradients with features.

dq, dk, dv: that of `tests.gradients`, with a second yardstick, the CPU path's gradients of the same out and
LSE. Like a kernel it takes Δ = rowsum(dO ∘ O) from an output in 16 bits, of which unfused PyTorch knows
nothing; where few keys share a row, that shows. So it does in the sums over all queries and keys that are the
gradients of slopes and sinks: those are held against the CPU path's, closer than either is to the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash import reference
from tests import cases
from tests.combinations import Combination, gradients
from tests.gradients import largest

# Of the distance of the CPU path from the oracle, and of the size of what is summed up.
PER_HEAD_YARDSTICK, PER_HEAD_FLOOR = 0.1, 2e-3

Attend = Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]  # leaves -> (out, lse)


def weights(case: Combination, device: str, with_lse: bool) -> tuple[Tensor, Tensor]:
    """The gradients of out, which its dtype holds exactly, and of the LSE."""
    generator = torch.Generator().manual_seed(case.seqlen_q + case.seqlen_k)
    shape = case.batch, case.heads, case.seqlen_q
    dout = torch.randn(*shape, case.head_dim_v, generator=generator).to(case.dtype)
    dlse = torch.randn(*shape, generator=generator) * with_lse
    return dout.to(device), dlse.to(device)


def by_cpu(
    case: Combination,
    tensors: dict[str, Tensor],
    outs: tuple[Tensor, Tensor],
    douts: tuple[Tensor, Tensor],
    scale: float | None,
) -> dict[str, Tensor]:
    """The gradients of the CPU path from these (out, lse)."""
    given = {name: x.detach().cpu() for name, x in tensors.items()}
    out, lse, dout, dlse = (x.detach().cpu() for x in (*outs, *douts))
    qkv = (given["q"], given["k"], given["v"])
    *grads, dalibi, dsinks = reference.backward_with(
        case.score(given), (dout.to(out.dtype), dlse), *qkv, out, lse, case.band, scale
    )
    if case.features.get("alibi") == 1:
        dalibi = dalibi.sum(dim=0)
    found = dict(zip(("q", "k", "v", "alibi", "sinks"), (*grads, dalibi, dsinks), strict=True))
    return {name: found[name].to(x.device) for name, x in tensors.items()}


def assert_feature_gradients(
    attend: Attend,
    case: Combination,
    tensors: dict[str, Tensor],
    douts: tuple[Tensor, Tensor],
    scale: float | None = None,
) -> dict[str, Tensor]:
    """Of q, k, v, alibi and sinks, by whatever `attend` is; they are returned."""

    def dense(by: Any) -> Attend:
        return lambda x: by(x["q"], x["k"], x["v"], case.band, scale, case.score(x))

    mine = gradients(attend, tensors, douts)
    with torch.no_grad():
        fused = by_cpu(case, tensors, attend(tensors), douts, scale)
    exact = gradients(dense(reference.dense), {name: x.double() for name, x in tensors.items()}, douts)
    rough = gradients(dense(reference.dense_low_precision), tensors, douts)
    most = max(largest(exact[name]) for name in "qkv")
    for name, x in tensors.items():
        value, oracle = mine[name], exact[name]
        assert (value.shape, value.dtype) == (x.shape, x.dtype), f"d{name}: {value.shape} of {value.dtype}"
        assert torch.isfinite(value).all(), f"d{name}: not finite"
        errors = [(y[name].double() - oracle).abs() for y in (rough, fused)]
        assert all(error.isfinite().all() for error in errors), "a yardstick that is no number"
        if name in ("alibi", "sinks"):
            _assert_sums_agree(name, value, fused[name], oracle)
        elif largest(oracle) <= 1e-12 * most:
            assert largest(value) <= 1e-4 * most + 2 * largest(errors[1]), f"d{name}: should be 0"
        else:
            cases.assert_error_within(f"d{name}", value, oracle, oracle + errors[0] + errors[1])
    return mine


def _assert_sums_agree(name: str, value: Tensor, fused: Tensor, oracle: Tensor) -> None:
    if not value.numel():
        return
    found, yardstick, size = (
        x.double().square().mean().sqrt().item() for x in (value - fused, fused - oracle, oracle)
    )
    allowed = PER_HEAD_YARDSTICK * yardstick + PER_HEAD_FLOOR * size + 1e-4
    assert found <= allowed, f"d{name}: {found:.3e} from the CPU path's, allowed {allowed:.3e}"
