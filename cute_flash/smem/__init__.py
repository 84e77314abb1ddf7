"""Shared-memory layouts of the kernels, in plain Python.

swizzle   the XOR swizzle
tile      the tiles of the kernels: names, shapes and strides of their layouts

`device/smem.py` makes CuTe layouts from them. The folder `layouts/` of the repository studies them: the layout
algebra, bank conflicts and pictures.
"""
