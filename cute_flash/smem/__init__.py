"""Shared-memory layouts of the kernels, in plain Python.

swizzle   the XOR swizzle
layout    shape:stride layouts, with and without a swizzle
tile      the tiles of the kernels, and the names of their layouts

`device/smem.py` converts them to CuTe layouts. The folder `layouts/` of the repository studies them: bank
conflicts, pictures, and the rest of the layout algebra.
"""
