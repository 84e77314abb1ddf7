"""Attention in plain PyTorch: the CPU path and the fp64 oracle.

    forward, backward      the CPU path of `attn`: exact and tiled, in O(S) memory
    dense                  the oracle of the tests: fp64, with S in memory
    dense_low_precision    the same formulas in the input's dtype, to measure the error of that dtype
    decode                 the CPU path and the oracle of `attn_decode`

`merge.py` has `merge` and `attention_probs`, which run on any device. The loop orders of FlashAttention 1 and 2, which
count the bytes that they move, are `tiled_kv_outer` and `tiled_q_outer` of `layouts.studies.loops`. The wheel does not
hold them; in a checkout of the repository they are attributes of this module too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cute_flash.reference import decode
from cute_flash.reference.cpu import backward, forward
from cute_flash.reference.dense import dense, dense_low_precision, plain_args

__all__ = ["backward", "decode", "dense", "dense_low_precision", "forward", "plain_args"]

_LOOP_ORDERS = ("Traffic", "tiled_kv_outer", "tiled_q_outer")

if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> Any:
        if name not in _LOOP_ORDERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module("layouts.studies.loops"), name)
        except ModuleNotFoundError as error:
            raise AttributeError(
                f"{name} is in layouts/studies/loops.py of the repository, which the wheel does not hold: "
                "run Python in the root of a checkout"
            ) from error
