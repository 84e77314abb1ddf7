"""How the backward kernel writes the gradient of a bias."""

from __future__ import annotations

import math
from dataclasses import replace

from cute_flash.score_mod.graph import COLUMN, ROW
from cute_flash.spec.features import MAPS, formulas_of
from cute_flash.spec.problem import Problem

# If at most this many scores share an element of the bias, the kernel may store their terms of its gradient.
MAX_TERMS = 4


def with_dbias(problem: Problem, deterministic: bool, allows_tma: bool = True) -> Problem:
    """Set the fields of `Problem.mods` about writing the gradient of the bias.

    If the bias does not broadcast, the kernel stores the gradient. If it does, there are two methods:

    - The kernel adds to the gradient by fp32 atomic additions, in no fixed order.
    - The kernel stores all terms, (B, H, Sq, Sk). TMA can store 16-bit terms, and `bwd_sum_dbias` sums them; at most
      MAX_TERMS per sum, so that they take at most twice the memory of fp32 sums. Deterministic gradients have fp32
      terms, which torch sums.

    `allows_tma`: False if the tile has no stages for TMA.
    """
    bias = problem.bias
    if bias is None:
        return problem
    mods = replace(problem.mods, bias_varies=ROW * (bias.shape[2] > 1) | COLUMN * (bias.shape[3] > 1))
    if not mods.bias_needs_grad:
        return replace(problem, mods=mods)
    is_full = bias.shape == problem.score_shape
    # TMA stores dS in the dtype of q. dS is the gradient of the bias unless a formula such as softcap, whose derivative
    # is a factor of dS, precedes the bias. With a semaphore the kernel has no warp for these stores.
    is_ds = mods.bias_dtype == problem.dtype and MAPS not in formulas_of(problem.features) and not deterministic
    tma = allows_tma and is_ds and mods.bias_tma and problem.seqlen_k % 8 == 0
    tma = tma and math.prod(problem.score_shape) <= MAX_TERMS * math.prod(bias.shape)
    accumulates = not (is_full or tma or deterministic)
    mods = replace(
        mods,
        # With atomic additions, the kernel is faster if threads load the bias.
        bias_tma=mods.bias_tma and not accumulates,
        dbias_dtype=bias.grad_dtype if is_full or tma else "float32",
        dbias_tma=tma,
        dbias_terms=tma and not is_full,
        dbias_accumulates=accumulates,
    )
    return replace(problem, mods=mods)
