"""Refuse keywords of `attn` that another entry does not take, such as an adapter or context parallelism.

The keywords are those of the TypedDicts of `spec.keywords`. An entry passes the keywords that it does not know to
`refuse`, so a new keyword of `attn` is never dropped in silence. tests/test_entries.py tests every entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.spec.foreign import unexpected_keyword
from cute_flash.spec.keywords import AttnKeywords, SharedKeywords

# Keyword -> the values that turn it off, and the remedy for other values.
Refused = Mapping[str, tuple[tuple[Any, ...], str]]


def refuse(
    entry: str,
    keywords: Mapping[str, Any],
    remedy: str = "call cute_flash.attn",
    others: Refused | None = None,
    ignores_unknown: bool = False,
) -> None:
    """Raise an error for the first keyword that is not off.

    Args:
        entry: The name of the function, for the message.
        keywords: The keywords that the function does not take.
        remedy: The end of the message for a keyword of `attn`.
        others: Keywords with their own remedies, of `attn` or of another library.
        ignores_unknown: Accept keywords that neither `attn` nor `others` has.

    Raises:
        UnsupportedError: A keyword of `attn` or `others` is on.
        TypeError: A keyword is unknown.
    """
    names = SharedKeywords.__annotations__ | AttnKeywords.__annotations__
    known = {**dict.fromkeys(names, ((None, False), remedy)), **(others or {})}
    for name, value in keywords.items():
        if name in known:
            off, advice = known[name]
            if isinstance(value, Tensor) or value not in off:
                shown = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise UnsupportedError(f"{name}={shown} in {entry}: {advice}")
        elif not ignores_unknown:
            raise TypeError(unexpected_keyword(entry, name))
