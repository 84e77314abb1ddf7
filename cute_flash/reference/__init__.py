"""Attention in plain PyTorch: the CPU path, the fp64 oracle, and the papers' loop orders.

    forward, backward               the CPU path of `attn`: exact and tiled, in O(S) memory
    dense                           the oracle: fp64, materialises S; the tests compare with it
    dense_low_precision             the same formulas in the input's precision, to measure the error of that precision
    tiled_q_outer, tiled_kv_outer   the loop orders of FlashAttention 2 and 1, with the number of bytes they move

`merge.py` has `merge` and `attention_probs`, which run on any device.
"""

from cute_flash.reference.cpu import backward, forward
from cute_flash.reference.dense import dense, dense_low_precision, plain_args
from cute_flash.reference.loops import Traffic, tiled_kv_outer, tiled_q_outer

__all__ = [
    "Traffic",
    "backward",
    "dense",
    "dense_low_precision",
    "forward",
    "plain_args",
    "tiled_kv_outer",
    "tiled_q_outer",
]
