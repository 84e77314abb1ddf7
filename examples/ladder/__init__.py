"""Attention kernels in CuTe DSL, from the naive one to the product's, one idea a rung; see docs/ladder.md."""
