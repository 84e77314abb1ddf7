"""Kernels and parameters that both families share."""
