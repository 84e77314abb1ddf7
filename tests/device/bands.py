"""The sides on which kernels bound a band, at compile time."""

from __future__ import annotations

from typing import Any

from cute_flash.spec.band import Band

# Left bound, right bound, chunk; the backward swaps queries and keys. A kernel with a chunk has both other bounds.
SIDES = ("", "r", "l", "lr", "lrc", "lrc of keys")


def band_of(kind: type[Band], sides: str, left: Any, right: Any, chunk: Any) -> Any:
    """A band of the class `kind` with the bounds that `sides` names."""
    bounded, _, of_keys = sides.partition(" ")
    band = kind(*(value if side in bounded else None for side, value in zip("lrc", (left, right, chunk))))
    return band.of_keys if of_keys else band
