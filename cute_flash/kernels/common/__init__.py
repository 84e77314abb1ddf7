"""Kernels, base classes and parameters that both families share."""
