"""Kernels with mma.sync and cp.async, for Ampere, Ada and later GPUs."""
