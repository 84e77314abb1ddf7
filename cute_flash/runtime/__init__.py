"""Runs plans on torch tensors: binds each plan to a Python function that launches its kernels."""
