"""Compiled kernels: compiler, disk cache, resource usage."""
