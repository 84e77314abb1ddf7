"""Compiles and loads kernels: compiler, disk cache, resource usage and NVTX ranges."""
