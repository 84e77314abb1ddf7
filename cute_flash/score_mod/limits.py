"""Limits that tracing, checks and planning share."""

from __future__ import annotations

# Sequences of a call with mods are shorter than this: fp32 holds sums and differences of two positions.
MAX_INDEX = 1 << 23
# On CUDA, the tiles of a block mask are multiples of this, so that the tiles of kernels divide them.
BLOCK_MASK_MULTIPLE = 128
# A mod with more operations per score needs registers of its own.
LONG_MOD_OPS = 8
