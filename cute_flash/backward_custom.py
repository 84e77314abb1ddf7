"""The gradients on CUDA with a bias, functions that users write, and block maps.

The main kernel writes the gradient of a bias that tells all scores apart as it is. That of another one is a
sum: fp32 additions in any order, or, where gradients are to be deterministic, torch's sum of all of them, for
which there must be memory. Gradients of tables are fp32 additions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_flash import backward, backward_general, custom_cuda, general
from cute_flash.custom_cuda import BIAS_DTYPES
from cute_flash.score_mod.block_sparse import query_block_indices
from cute_flash.score_mod.graph import COLUMN, ROW
from cute_flash.spec.args import How
from cute_flash.spec.problem import Problem, UnsupportedError

# Of a table: kernels count its elements in 32 bits.
MAX_ELEMENTS = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class BiasGradient:
    """What the kernel writes, and what becomes of it."""

    bias: Tensor
    written: Tensor  # of the bias's shape, or (B, H, Sq, Sk)
    is_added: bool

    @staticmethod
    def of(bias: Tensor, problem: Problem, deterministic: bool) -> BiasGradient:
        whole = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
        if tuple(bias.shape) == whole:
            # Blocks that are not visited write nothing.
            visits_all = problem.static.is_bounded is False and not problem.features.block_map
            make = torch.empty if visits_all and not problem.is_empty else torch.zeros
            dtype = bias.dtype if bias.dtype in BIAS_DTYPES else torch.float32
            return BiasGradient(bias, make(whole, dtype=dtype, device=bias.device), False)
        shape = whole if deterministic else bias.shape
        sums = torch.zeros(shape, dtype=torch.float32, device=bias.device)
        return BiasGradient(bias, sums, not deterministic)

    def found(self) -> Tensor:
        """The gradient, in the bias's dtype."""
        shared = [i for i in range(4) if self.written.shape[i] != self.bias.shape[i]]
        found = self.written.sum(dim=shared, keepdim=True) if shared else self.written
        return general.as_that_of(self.bias, found)


def bwd_cuda(dout, dlse, q, k, v, out, lse, how: How, custom: Any, problem: Problem) -> Any:
    """What `custom_bwd` returns, of a checked `custom.Custom` and its problem; None where it has nothing."""
    deterministic = how.deterministic or backward.is_mode_deterministic()
    problem, given, of_bias = described(custom, problem, deterministic)
    wanted, block_map = problem.mods.captures_needing_grad, custom.block_map
    if any(custom.tables[i].numel() > MAX_ELEMENTS for i in wanted):
        raise UnsupportedError(
            f"the gradient of a captured tensor of more than {MAX_ELEMENTS} elements on cuda"
        )
    sums = [torch.zeros(custom.tables[i].shape, dtype=torch.float32, device=q.device) for i in wanted]
    heads = problem.batch, problem.heads

    def more(tile: Any) -> tuple[Any, ...]:
        """What the kernel takes besides: see `kernels.bwd_custom`."""
        lists = None
        if block_map:
            lists = query_block_indices(
                block_map, custom.block_sizes, batch=problem.batch, heads=problem.heads,
                heads_kv=problem.heads_kv, tile=(tile.tile_m, tile.tile_n),
            )  # fmt: skip
        dbias = None if of_bias is None else of_bias.written.expand(*heads, -1, -1)
        dtables = [x if x.dim() else x.view(1) for x in sums]
        return given.bias, given.tables, given.numbers, dbias, dtables or None, lists

    *grads, dalibi, dsinks = backward_general.bwd_cuda(
        dout, dlse, q, k, v, out, lse, how, problem, None if problem.is_empty else more
    )
    dtables: list[Tensor | None] = [None] * len(custom.tables)
    for i, grad in zip(wanted, sums, strict=True):
        dtables[i] = general.as_that_of(custom.tables[i], grad)
    dbias = None if of_bias is None else of_bias.found()
    return *grads, *general._per_head(how, dalibi, dsinks), dbias, dtables


def described(
    custom: Any, problem: Problem, deterministic: bool
) -> tuple[Problem, custom_cuda.Given, BiasGradient | None]:
    """The problem with all that is compiled in, the arguments that the forward has too, and the gradient of a
    bias that wants one.
    """
    given = custom_cuda.given(custom, problem, in_gradients=True)
    problem, bias = custom_cuda.with_mods(problem, given), custom.bias
    if bias is None:
        return problem, given, None
    of_bias = BiasGradient.of(bias, problem, deterministic) if problem.mods.bias_needs_grad else None
    bits = ROW * (bias.shape[2] > 1) | COLUMN * (bias.shape[3] > 1)
    of_kernel = ("", False) if of_bias is None else (str(of_bias.written.dtype), of_bias.is_added)
    return _with_gradient(problem, bits, *of_kernel), given, of_bias


@lru_cache(maxsize=1024)
def _with_gradient(problem: Problem, bits: int, dtype: str, is_added: bool) -> Problem:
    """Of a bias."""
    mods = replace(
        problem.mods,
        bias_varies=bits,
        dbias_dtype=dtype.removeprefix("torch."),
        dbias_accumulates=is_added,
    )
    return replace(problem, mods=mods)
