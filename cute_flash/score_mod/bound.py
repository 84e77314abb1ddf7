"""The mods of one call bound to the values that they capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash.score_mod.graphs import Graphs, interned
from cute_flash.score_mod.trace import BoundMod, bind

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class BoundMods(NamedTuple):
    """The mods of a call with the values that they captured, concatenated in the order of `Graphs`."""

    graphs: Graphs
    captures: tuple[Tensor, ...]
    scalars: tuple[float, ...]

    @staticmethod
    def of(score_mod: Callable | None, mask_mod: Callable | None, score_mod_bwd: Callable | None) -> BoundMods:
        if score_mod is None and mask_mod is None and score_mod_bwd is None:
            return NO_MODS
        check_mods(score_mod, score_mod_bwd)
        score = _NO_MOD if score_mod is None else bind(score_mod, "score_mod")
        mask = _NO_MOD if mask_mod is None else bind(mask_mod, "mask_mod")
        bwd = _NO_MOD if score_mod_bwd is None else bind(score_mod_bwd, "score_mod_bwd")
        graphs = interned(score.graph, mask.graph, bwd.graph)
        captures = score.captures + mask.captures + bwd.captures
        return BoundMods(graphs, captures, score.scalars + mask.scalars + bwd.scalars)


def check_mods(score_mod: Callable | None, score_mod_bwd: Callable | None) -> None:
    if score_mod_bwd is not None and score_mod is None:
        raise ValueError("score_mod_bwd without score_mod: give the score_mod whose gradient it computes")


def mod_arguments(
    score_mod: Callable | None, mask_mod: Callable | None, score_mod_bwd: Callable | None, device: torch.device
) -> tuple[str, tuple[Tensor, ...], tuple[float, ...]]:
    """The fields mod_graphs, captures and scalars of `AttentionArgs` for a call on a device."""
    if _is_dynamo_compiling():
        from cute_flash.score_mod import compiled

        return compiled.mod_arguments(score_mod, mask_mod, score_mod_bwd, device)
    mods = BoundMods.of(score_mod, mask_mod, score_mod_bwd)
    return mods.graphs.text, mods.captures, mods.scalars


_NO_MOD: Any = BoundMod(None, (), ())  # type: ignore[arg-type]
NO_MODS = BoundMods(Graphs(), (), ())
