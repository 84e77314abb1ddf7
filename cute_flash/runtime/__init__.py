"""Runs plans on torch tensors: binds them to functions, and launches their kernels."""
