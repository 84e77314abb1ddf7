"""Functions, a bias and a block map on CUDA: what of them is compiled in, and the kernels' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash.score_mod.graph import Graph
from cute_flash.score_mod.mod_spec import ModSpec
from cute_flash.score_mod.tensor_cache import TensorCache
from cute_flash.spec.problem import Problem

BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_ROW_BYTES = (1 << 31) - 1  # from a row of the bias to the next


class Given(NamedTuple):
    """What a kernel takes after all else, but for the list of a packed batch's tiles. None: not there."""

    bias: Tensor | None  # (B, H, Sq, Sk), with strides of 0 where it does not tell apart
    tables: list[Tensor] | None  # of score_mod, of mask_mod, of score_mod_bwd
    numbers: list[int | float] | None
    lists: list[Tensor] | None  # how many blocks are full, and which; the same of partial ones


def given(custom: Any, problem: Problem, in_gradients: bool = False) -> Given:
    """Of a checked `custom.Custom`.

    The forward takes no arguments of score_mod_bwd; gradients have lists of their own: see `block_sparse`.
    """
    graphs = custom.graphs
    found = (graphs.score, graphs.mask, graphs.bwd if in_gradients else None)
    num = sum(0 if x is None else len(x.captures) for x in found)
    tables = [_table(x) for x in custom.tables[:num]]
    numbers = _numbers(found, custom.numbers)
    bias = None if custom.bias is None else as_bias(custom.bias, problem)
    has_lists = bool(custom.block_map) and not in_gradients
    lists = _lists(custom.block_map, (problem.batch, problem.heads)) if has_lists else None
    return Given(bias, tables or None, numbers or None, lists)


def with_mods(problem: Problem, given: Given) -> Problem:
    """A checked problem, which has `static_of`, with all that a kernel is compiled for."""
    if given.bias is None:
        return problem
    bias = given.bias
    # What is fetched how decides tiles, and memory may differ from batch to batch.
    is_fetched = not problem.features.batch_invariant and is_aligned(bias)
    return _with_bias(problem, bias.dtype, reads_pairs(bias), is_fetched, bias.stride(2) != 0)


@lru_cache(maxsize=1024)
def _with_bias(
    problem: Problem, dtype: torch.dtype, reads_pairs: bool, is_aligned: bool, varies_by_row: bool
) -> Problem:
    mods = replace(
        problem.mods,
        bias_dtype=str(dtype).removeprefix("torch."),
        bias_paired_loads=reads_pairs,
        bias_tma=is_aligned,
        bias_varies_by_row=varies_by_row,
    )
    return replace(problem, mods=mods)


def static_of(custom: Any) -> ModSpec:
    """But for what the bias's memory decides."""
    block = custom.block_sizes[:2] if custom.block_map else None
    return ModSpec(
        graphs=custom.graphs,
        block_mask_tile=None if block is None else (block[0], block[1]),
        bias_needs_grad=custom.bias is not None and bool(custom.wants) and custom.wants[0],
        captures_needing_grad=custom.wanted if custom.wants else (),
    )


def as_bias(bias: Tensor, problem: Problem) -> Tensor:
    """(B, H, Sq, Sk), in a dtype that kernels read."""
    bias = bias if bias.dtype in BIAS_DTYPES else bias.float()
    if bias.stride(2) * bias.element_size() > MAX_ROW_BYTES:
        bias = bias.contiguous()
    whole = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    return bias if bias.shape == whole else bias.expand(whole)


def reads_pairs(bias: Tensor) -> bool:
    """Whether all pairs of keys that begin with an even one are aligned, and whole."""
    *others, last = bias.stride()
    is_even = not any(x % 2 for x in (*others, bias.shape[3]))
    return last == 1 and is_even and bias.data_ptr() % (2 * bias.element_size()) == 0


def is_aligned(bias: Tensor) -> bool:
    """Whether the copy engine can fetch blocks of it: 16 bits, and rows of their own that begin at multiples
    of 16 bytes.
    """
    *others, row, last = bias.stride()
    begins = (*others, row, bias.data_ptr() // 2)
    return bias.element_size() == 2 and last == 1 and row > 0 and not any(x % 8 for x in begins)


def _table(table: Tensor) -> Tensor:
    """As `device.mods` reads it: bools as bytes, a single value as one of a row."""
    if 0 in table.shape:
        raise ValueError(f"a captured tensor has shape {tuple(table.shape)}: there is nothing to read")
    if table.dtype == torch.bool:
        table = table.view(torch.uint8)
    elif table.dtype == torch.float64:
        table = table.float()
    return table if table.dim() else table.view(1)


def _numbers(graphs: Sequence[Graph | None], numbers: Sequence[float]) -> list[int | float]:
    kinds = [kind for graph in graphs if graph is not None for kind in graph.scalars]
    return [int(x) if kind == "int" else float(x) for kind, x in zip(kinds, numbers)]


_known: TensorCache[list[Tensor]] = TensorCache(64)  # of maps that calls had


def _lists(block_map: list[Tensor], heads: tuple[int, int]) -> list[Tensor]:
    """Of `BlockMask.tensors`: the numbers and indices of full blocks, and of partial ones, by head."""
    partial, full = block_map[:2], block_map[2:4]
    own = [*full, *partial]
    found = _known.get(own, heads)
    if found is None:
        # Detached: a view would keep the map.
        found = [x.contiguous().expand(*heads, *(-1,) * (x.dim() - 2)).detach() for x in own]
        if all(x.is_contiguous() for x in own):
            # Whatever is written into the map is seen in them.
            _known.put(own, heads, found)
    return found
