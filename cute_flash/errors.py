"""Errors for valid arguments that no kernel supports."""

from __future__ import annotations


class UnsupportedError(ValueError):
    """No kernel supports the arguments. The message names the value and an alternative."""


class TraceError(UnsupportedError):
    """A score_mod or mask_mod cannot be compiled into a kernel; the message names the operation and line."""
