"""Conversions of the keywords that are not tensors. A wrong type raises a `ValueError` that names the argument."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.spec.problem import check_chunk, check_window

# The schemas of the operators have integers of 64 bits.
MAX_INT = (1 << 63) - 1
# Remedies for a number that is a learned parameter, for the error message.
_LEARNED = {
    "scale": "call attn(q * scale, k, v, scale=1.0), which gives it a gradient through q",
    "softcap": "capture it in score_mod=lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)",
}


def as_float(name: str, value: Any) -> float:
    """A number as a float. A tensor must have one element, and must not require grad."""
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            remedy = _LEARNED.get(name, "detach it")
            raise UnsupportedError(
                f"{name} is a tensor that requires grad, but attn computes no gradient for it: {remedy}"
            )
        if value.numel() != 1 or value.is_complex():
            raise ValueError(f"{name} is a {value.dtype} tensor of shape {tuple(value.shape)}: give a number")
        return float(value)
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name}={value!r} is a {type(value).__name__}: give a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} exceeds the range of floats: give a smaller number") from None


def check_range(name: str, value: float, dtype: torch.dtype) -> None:
    """Raise `ValueError` for a finite number that the dtype of scores cannot represent."""
    largest = torch.finfo(dtype).max
    if abs(value) > largest:
        name_of_dtype = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name}={value} exceeds {largest:.2g}, the largest {name_of_dtype}, the dtype of the scores")


def as_bool(name: str, value: Any) -> bool:
    """A flag as a bool: True, False, 0, 1, or a numpy bool."""
    if value is True or value is False:
        return value
    if type(value).__name__ in ("bool", "bool_") or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise ValueError(f"{name}={value!r}: give True or False")


def as_int(name: str, value: Any, remedy: str = "give a whole number") -> int:
    """An integer of 64 bits: anything with `__index__`, such as numpy integers and integer tensors of one element."""
    if (type(value) is int and -MAX_INT <= value <= MAX_INT) or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is not None:
        if not -MAX_INT <= number <= MAX_INT:
            raise ValueError(f"{name}={number} exceeds 64 bits: {remedy}")
        return number
    raise ValueError(f"{name}={value!r} is a {type(value).__name__}: {remedy}")


def as_window(window: Any) -> tuple[int | None, int | None]:
    """(left, right), with None for an unbounded side."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window={window!r}: give (left, right), a number of keys or None for each side")
    remedy = "use a whole number of keys, or None for an unbounded side"
    left, right = window
    if left is not None:
        left = as_int("window left", left, remedy)
    if right is not None:
        right = as_int("window right", right, remedy)
    check_window((left, right))
    return left, right


def as_chunk(chunk: Any) -> int | None:
    """The number of keys of a chunk; None for no chunks."""
    chunk = as_int("attention_chunk", chunk, "use a whole number of keys, or None for no chunks")
    if not isinstance(chunk, int) or chunk:
        check_chunk(chunk)
        return chunk
    return None


def check_are_tensors(**tensors: Any) -> None:
    """Raise `ValueError` for the first argument that is not a tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__module__}.{type(x).__name__}: give a torch.Tensor")
