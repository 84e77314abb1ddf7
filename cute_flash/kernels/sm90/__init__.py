"""Warp-specialised kernels with wgmma and TMA, for Hopper."""
