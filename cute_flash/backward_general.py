"""The gradients on CUDA with what a call asks for beyond plain attention.

The main kernel computes what softcap, ALiBi and dropout change, and parts of the sums that are the gradients
of slopes. That of a sink needs no more than the statistics of rows, and is a sum of torch's:

    dsinks = -Σ exp(sink - LSE) Δ
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash import backward, operands
from cute_flash.backward import Launch
from cute_flash.forward import extra_arguments
from cute_flash.planning import plan as planning
from cute_flash.spec.args import How
from cute_flash.spec.problem import PLAIN, Problem

# dq, dk, dv, and where they are asked for the gradients of slopes, (B, H) or of shared ones (1, H), and of
# sinks (H).
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
# With whether the main kernel is the plain one.
_launches: dict[tuple, tuple[Launch, bool]] = {}


def bwd_cuda(
    dout, dlse, q, k, v, out, lse, how: How, problem: Problem, more: Callable[[Any], tuple] | None = None
) -> Gradients:
    """`problem` describes the call, and was checked. `more`: what a custom kernel takes, of its tile."""
    if problem.is_empty:
        zeros = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        return *zeros, *_of_nothing(dlse, lse, how, problem)
    deterministic = how.deterministic or backward.is_mode_deterministic()
    signature = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), dout.stride(), out.stride(), q.dtype,
        q.get_device(), how.window_left is None, how.window_right is None, problem.features, problem.mods,
        dlse is None, deterministic, planning.requested_family(),
    )  # fmt: skip
    known = _launches.get(signature)
    if known is None:
        launch = backward.prepare(dout, dlse, q, k, v, out, problem, deterministic)
        known = launch, problem.features.in_gradients == PLAIN
        operands.remember(_launches, signature, known)
    launch, is_plain = known

    def terms(scale: float, room: tuple[Any, ...], tile: Any) -> tuple[Any, ...]:
        """What the main kernel takes besides."""
        heads = problem.batch, problem.heads
        softcap, slopes, _sinks, *dropout, _most = extra_arguments(how, scale, lse, heads)
        dslopes = room[-1] if slopes is not None else None
        return softcap, slopes, dslopes, *dropout, *(() if more is None else more(tile))

    def finish(room: tuple[Any, ...]) -> tuple[Tensor | None, Tensor | None]:
        dalibi = dsinks = None
        if how.alibi is not None:
            is_shared = how.alibi.dim() == 1
            dalibi = room[-1].sum(dim=(0, 2))[None] if is_shared else room[-1].sum(dim=-1)
        if how.sinks is not None:
            delta = room[1][:, :, : problem.seqlen_q]
            dsinks = _dsinks(how.sinks, lse, delta, dlse, _num_blind(problem))
        return dalibi, dsinks

    window = backward.kernel_window(how.window_left, how.window_right)
    found: Any = launch(dout, dlse, q, k, v, out, lse, how.scale, window, None if is_plain else terms, finish)
    return found


def _num_blind(problem: Problem) -> int:
    """Queries that see no key: the first ones, where the right bound hides all keys."""
    right, sq, sk = problem.band.right, problem.seqlen_q, problem.seqlen_k
    if sk == 0:
        return sq
    return 0 if right is None else min(sq, max(0, sq - sk - right))


def _dsinks(sinks: Tensor, lse: Tensor, delta: Tensor | None, dlse: Tensor | None, num_blind: int) -> Tensor:
    """-Σ exp(sink - LSE) Δ over batch and queries. Blind ones have Δ = -dLSE, whatever flows into them."""
    # Without a sink such a query has an LSE of -inf, and no weight.
    weights = torch.exp(sinks.float()[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    if delta is None:
        total = sinks.new_zeros(sinks.shape, dtype=torch.float32)
    else:
        total = -(weights * delta)[:, :, num_blind:].sum(dim=(0, 2))
    if dlse is not None and num_blind:
        total += (weights * dlse)[:, :, :num_blind].sum(dim=(0, 2))
    return total


def _of_nothing(dlse, lse: Tensor, how: How, problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """No keys, or no queries: the gradient of the LSE is all that there may be."""
    dalibi = None if how.alibi is None else lse.new_zeros(problem.batch, problem.heads)
    return dalibi, None if how.sinks is None else _dsinks(how.sinks, lse, None, dlse, problem.seqlen_q)
