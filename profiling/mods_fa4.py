"""FlashAttention-4 (`flash_attn.cute`) as a side of the cells of `mods`: its mods and its block lists.

Hopper refuses none of the functions there: it takes at most two scores at a time in a score_mod, one pair in
a mask_mod, and lists whose blocks of keys are its tile. A bias is left out: the only one it has is an aux
tensor of all pairs, read score by score.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from profiling.features import gradients_of
from profiling.timing import Contender, describe

# (rows, keys) of a block by head dim: the tiles it chooses for itself, and of the backward's the finest, so
# that it skips the most.
FORWARD_BLOCKS = {64: (192, 128), 128: (128, 128)}
BACKWARD_BLOCKS = {64: (128, 128), 128: (64, 128)}


def missing() -> str | None:
    """Why it cannot be imported here. Only looked for: importing it patches the DSL that compiles ours."""
    try:
        is_here = importlib.util.find_spec("flash_attn.cute") is not None
    except Exception as error:
        return describe(error)
    return None if is_here else "no package flash_attn.cute"


def function(name: str, *args: Any) -> Any:
    """One of `fa4_functions`, imported when it is wanted: it takes the CuTe DSL."""
    return getattr(importlib.import_module("profiling.fa4_functions"), name)(*args)


def block_lists(mask: Callable[..., Any], x: Tensor, direction: str) -> tuple[tuple[Tensor, ...], Any]:
    """Counts and indices of partial and of full blocks, and the size of a block. Forward: the keys of each
    block of rows; backward: the rows of each block of keys."""
    seqlen, head_dim = x.shape[2:]
    block = (FORWARD_BLOCKS if direction == "fwd" else BACKWARD_BLOCKS)[head_dim]
    made = create_block_mask(mask, None, None, seqlen, seqlen, device=x.device, BLOCK_SIZE=block)
    of = "kv" if direction == "fwd" else "q"
    names = (f"{of}_num_blocks", f"{of}_indices", f"full_{of}_num_blocks", f"full_{of}_indices")
    return tuple(getattr(made, name) for name in names), block


@dataclass(frozen=True)
class Fa4Side:
    """Everything is made when it is prepared: without the package, or with one that does not take the
    function, this side fails and no other."""

    inputs: tuple[Tensor, ...]  # (B, H, S, D)
    make: Callable[[], Any]  # a function of `fa4_functions`
    mask: Callable[..., Any] | None = None  # the same mask in torch, from which the lists are made
    is_bshd: ClassVar[bool] = True

    def prepare(self, direction: str) -> Contender:
        attend = importlib.import_module("flash_attn.cute.interface").flash_attn_func
        options = self.make().options()
        if self.mask is not None:
            options["block_sparse_tensors"] = self._lists("fwd")
        leaves = [x.transpose(1, 2).contiguous() for x in self.inputs]
        if direction == "fwd":
            return Contender(torch.no_grad()(lambda: attend(*leaves, **options)[0]))
        if self.mask is not None:
            options["block_sparse_tensors_bwd"] = self._lists("bwd")
        return gradients_of(lambda *given: attend(*given, **options)[0], leaves, self.is_bshd)

    def _lists(self, direction: str) -> Any:
        assert self.mask is not None
        tensors, block = block_lists(self.mask, self.inputs[0], direction)
        lists = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
        return lists(*tensors, block_size=block)
