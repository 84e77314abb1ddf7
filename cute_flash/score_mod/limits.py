"""Limits that planning, checks and tracing share."""

from __future__ import annotations

# Positions that a mod sees are less than this: fp32 represents all integers up to twice as many exactly.
MAX_INDEX = 1 << 23
# Tiles of a block mask are multiples of this on CUDA, so that the tiles of kernels divide them.
MAP_BLOCK = 128
# A mod with more operations per score needs registers of its own.
LONG_FUNCTION = 8
