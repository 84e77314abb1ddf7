"""Shared-memory layouts of the kernels, in plain Python.

swizzle   the XOR swizzle
tile      tiles in shared memory: variants, shapes and strides

`device/memory/smem.py` turns them into CuTe layouts. The folder `layouts/` of the repository explains them, and counts
their bank conflicts.
"""
