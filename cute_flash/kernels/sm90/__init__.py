"""Kernels with wgmma, TMA and specialised warps: Hopper."""
