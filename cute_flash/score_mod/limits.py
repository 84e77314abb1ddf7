"""Limits of mods that tracing, checks and planning share."""

from __future__ import annotations

# Sequences of a call with mods must be shorter than this, so that fp32 represents sums of two positions exactly.
MAX_INDEX = 1 << 23
# On CUDA, the blocks of a block mask must be multiples of this, so that the tiles of kernels divide them.
BLOCK_MASK_MULTIPLE = 128
# Mods with more operations per score need additional registers, and are not fused with exp2.
LONG_MOD_OPS = 8
