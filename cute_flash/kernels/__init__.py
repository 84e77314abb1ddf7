"""Kernels, one folder per family, and the parts that both families share."""
