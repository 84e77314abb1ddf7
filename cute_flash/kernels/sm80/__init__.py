"""Kernels with mma.sync and cp.async: Ampere, Ada, and any later GPU."""
