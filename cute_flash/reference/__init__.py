"""Attention in plain PyTorch: the CPU path, the fp64 oracle, and the papers' loop orders.

    forward, backward               the CPU path of `attn`: exact and tiled, in O(S) memory
    dense                           the oracle of the tests: fp64, with S in memory
    dense_low_precision             the same formulas in the input's dtype, to measure the error of that dtype
    decode                          the CPU path and the oracle of `attn_decode`
    tiled_q_outer, tiled_kv_outer   the loop orders of FlashAttention 2 and 1, with the bytes that they move

`merge.py` has `merge` and `attention_probs`, which run on any device.
"""

from cute_flash.reference import decode
from cute_flash.reference.cpu import backward, forward
from cute_flash.reference.dense import dense, dense_low_precision, plain_args
from cute_flash.reference.loops import Traffic, tiled_kv_outer, tiled_q_outer

__all__ = [
    "Traffic",
    "backward",
    "decode",
    "dense",
    "dense_low_precision",
    "forward",
    "plain_args",
    "tiled_kv_outer",
    "tiled_q_outer",
]
