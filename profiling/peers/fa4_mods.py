"""FlashAttention-4 (`flash_attn.cute`) as a peer in the cells of `mods`: its mods and its block-sparse indices.

On Hopper it supports all functions of `mods`: up to two scores at a time in a score_mod, one pair in a mask_mod, and
K/V blocks of the size of its tile. A bias is left out: FlashAttention-4 has only an aux tensor of all pairs, which it
reads score by score.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from profiling.measure.timing import TimedCall, describe
from profiling.peers.peer import gradients_of, to_bshd

# (queries, keys) of a block by head dim. In the backward these are the smallest that it supports, because they skip
# the most.
FORWARD_BLOCKS = {64: (192, 128), 128: (128, 128)}
BACKWARD_BLOCKS = {64: (128, 128), 128: (64, 128)}


def missing() -> str | None:
    """Why the package cannot be found, or None. It is not imported: that would patch the DSL of our kernels."""
    try:
        is_here = importlib.util.find_spec("flash_attn.cute") is not None
    except Exception as error:
        return describe(error)
    return None if is_here else "no package flash_attn.cute"


def function(name: str, *args: Any) -> Any:
    """Make a function of `fa4_functions`, which is imported here because it imports the CuTe DSL."""
    return getattr(importlib.import_module("profiling.peers.fa4_functions"), name)(*args)


def block_indices(mask: Callable[..., Any], x: Tensor, direction: str) -> tuple[tuple[Tensor, ...], Any]:
    """Counts and indices of partial and full blocks, and the size of a block.

    Forward: the K/V blocks of each query block; backward: the query blocks of each K/V block.
    """
    seqlen, head_dim = x.shape[2:]
    block = (FORWARD_BLOCKS if direction == "fwd" else BACKWARD_BLOCKS)[head_dim]
    made = create_block_mask(mask, None, None, seqlen, seqlen, device=x.device, BLOCK_SIZE=block)
    of = "kv" if direction == "fwd" else "q"
    names = (f"{of}_num_blocks", f"{of}_indices", f"full_{of}_num_blocks", f"full_{of}_indices")
    return tuple(getattr(made, name) for name in names), block


def prepare(
    inputs: Sequence[Tensor], make: Callable[[], Any], mask: Callable[..., Any] | None, direction: str
) -> TimedCall:
    """The call on (B, H, S, D) inputs; its results are (B, S, H, D).

    `make` makes a function of `fa4_functions`; `mask` is the same mask in torch, for the block indices. The package is
    imported here: without it only this peer fails.
    """
    attend = importlib.import_module("flash_attn.cute.interface").flash_attn_func
    options = make().options()
    if mask is not None:
        options["block_sparse_tensors"] = _blocks(mask, inputs[0], "fwd")
    leaves = to_bshd(inputs)
    if direction == "fwd":
        return TimedCall(torch.no_grad()(lambda: attend(*leaves, **options)[0]))
    if mask is not None:
        options["block_sparse_tensors_bwd"] = _blocks(mask, inputs[0], "bwd")
    return gradients_of(lambda *tensors: attend(*tensors, **options)[0], leaves, is_bshd=True)


def _blocks(mask: Callable[..., Any], x: Tensor, direction: str) -> Any:
    tensors, block = block_indices(mask, x, direction)
    return importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch(*tensors, block_size=block)
