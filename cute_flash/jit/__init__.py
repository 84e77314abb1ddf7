"""Compiles and loads kernels: compiler, disk cache, resource usage, NVTX ranges and progress."""
