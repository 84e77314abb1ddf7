"""Errors for requests that are well formed but cannot be served."""

from __future__ import annotations


class UnsupportedError(ValueError):
    """A well-formed request that no kernel serves; the message names the value and what would work."""


class TraceError(UnsupportedError):
    """A score_mod or mask_mod cannot be compiled into a kernel; the message names the operation and line."""
