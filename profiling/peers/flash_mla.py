"""FlashMLA as a peer: decoding over pages of 64 rows whose first 512 columns are the values."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

PAGE_SIZE = 64  # rows of a page, the only size that it supports


def flash_mla_module() -> Any:
    return importlib.import_module("flash_mla")


def flash_mla_decode(
    q: Tensor, pages: Tensor, page_table: Tensor, lengths: Tensor, value_dim: int, scale: float, causal: bool
) -> Callable[[], Tensor]:
    """A call that decodes. The first one makes the metadata of its scheduler, so it is not timed."""

    @cache
    def metadata() -> tuple[Any, Any]:
        # Early releases need the lengths and the number of query rows; later ones ignore them.
        return flash_mla_module().get_mla_metadata(lengths, q.shape[1] * q.shape[2], 1)

    def call() -> Tensor:
        function = flash_mla_module().flash_mla_with_kvcache
        options = {"softmax_scale": scale, "causal": causal}
        return function(q, pages, page_table, lengths, value_dim, *metadata(), **options)[0]

    return call
