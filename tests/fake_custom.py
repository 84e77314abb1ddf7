"""A bias, functions and a block map in stand-ins for kernels: see `tests.fake_gpu`, `tests.fake_backward`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash.planning.plan import CompileKey
from cute_flash.reference.user_mods import Written
from cute_flash.score_mod.block_mask import BlockIndices, BlockMask
from cute_flash.score_mod.block_sparse import HEAD_SHIFT, IS_LAST, IS_PARTIAL, M_BLOCK_SHIFT
from cute_flash.score_mod.evaluate import evaluate
from cute_flash.score_mod.graph import COLUMN, ROW, Graph
from cute_flash.score_mod.lower import lowered
from cute_flash.score_mod.mod_spec import ModSpec

Tables, Numbers = list[Tensor] | None, list[Any] | None


def check_given(
    mods: ModSpec, shape: torch.Size, bias: Tensor | None, tables: Tables, numbers: Numbers
) -> None:
    """What kernels of both directions take, against what they were compiled for. `shape`: (B, H, Sq, Sk)."""
    assert (bias is not None) == bool(mods.bias_dtype)
    if bias is not None:
        assert bias.shape == shape and str(bias.dtype) == f"torch.{mods.bias_dtype}"
        assert bias.stride(3) == 1 or not mods.bias_paired_loads
    graphs = [x for x in (mods.graphs.score, mods.graphs.mask, mods.graphs.bwd) if x is not None]
    expected = [table for graph in graphs for table in graph.captures]
    assert len(expected) == len(tables or ()) and (tables or tables is None)
    for table, x in zip(expected, tables or ()):
        names = {"bool": "uint8", "float64": "float32"}
        assert str(x.dtype) == f"torch.{names.get(table.dtype, table.dtype)}"
        assert x.dim() == max(1, table.rank)
    kinds = [kind for graph in graphs for kind in graph.scalars]
    assert [type(x).__name__ for x in numbers or ()] == kinds and (numbers or numbers is None)


class GivenForward(NamedTuple):
    """What a forward kernel takes; None: not there."""

    bias: Tensor | None
    tables: Tables
    numbers: Numbers
    lists: list[Tensor] | None

    def written(self, key: CompileKey, shape: torch.Size) -> Written:
        """For the reference, once all was checked."""
        mods = key.static.mods
        check_given(mods, shape, self.bias, self.tables, self.numbers)
        graphs = [x for x in (mods.graphs.score, mods.graphs.mask) if x is not None]
        expected = [table for graph in graphs for table in graph.captures]
        # As a call has them: bools, and single values.
        tables = [x.view(torch.bool) if t.dtype == "bool" else x for t, x in zip(expected, self.tables or ())]
        tables = [x if t.rank else x[0] for t, x in zip(expected, tables)]
        parts = mods.graphs.split(tables, self.numbers or ())
        return Written(mods.graphs, parts, self.bias, self._map(key, shape))

    def _map(self, key: CompileKey, shape: torch.Size) -> BlockMask | None:
        block = key.static.mods.block_mask_tile
        assert (self.lists is not None) == (block is not None) == key.static.features.block_map
        if self.lists is None:
            return None
        rows, columns = (-(-n // size) for n, size in zip(shape[2:], block))
        for x, expected in zip(self.lists, ((rows,), (rows, columns)) * 2, strict=True):
            assert x.shape == (*shape[:2], *expected) and x.dtype == torch.int32 and x.stride(-1) == 1
        full, partial = (BlockIndices(*self.lists[i : i + 2]) for i in (0, 2))
        # Lists of blocks of queries are the backward's.
        return BlockMask(*block, *shape[2:], partial, full, partial, full)


@dataclass
class Given:
    """What a backward kernel takes; None: not there."""

    key: CompileKey
    bias: Tensor | None
    tables: list[Tensor] | None
    numbers: list[Any] | None
    dbias: Tensor | None
    dtables: list[Tensor] | None
    lists: list[Tensor] | None

    def check(self, shape: torch.Size) -> None:
        """Against what the kernel was compiled for: see `kernels.bwd_custom`. `shape`: (B, H, Sq, Sk)."""
        mods, features = self.key.static.mods, self.key.static.features
        check_given(mods, shape, self.bias, self.tables, self.numbers)
        assert (self.bias is not None) == features.bias
        assert (self.dbias is not None) == bool(mods.dbias_dtype)
        assert (self.lists is not None) == features.block_map
        assert mods.block_mask_tile is None
        if self.dbias is not None:
            shared = self.dbias.shape != shape or 0 in self.dbias.stride()
            assert shared <= mods.dbias_accumulates and str(self.dbias.dtype) == f"torch.{mods.dbias_dtype}"
            sizes = zip(
                self.dbias.shape, shape, (True, True, mods.bias_varies & ROW, mods.bias_varies & COLUMN)
            )
            is_whole = not mods.dbias_accumulates
            assert all(mine == n if tells or is_whole else mine == 1 for mine, n, tells in sizes)
            assert self.dbias.stride(3) == 1
        if self.bias is not None:
            tells = [s != 0 and n > 1 for n, s in zip(self.bias.shape[2:], self.bias.stride()[2:])]
            assert tells[0] <= bool(mods.bias_varies & ROW) and tells[1] <= bool(mods.bias_varies & COLUMN)
        assert len(mods.captures_needing_grad) == len(self.dtables or ())
        assert self.dtables or self.dtables is None
        for x in self.dtables or ():
            assert x.dtype == torch.float32 and x.is_contiguous() and x.dim() >= 1 and not x.any()

    @property
    def parts(self) -> Any:
        return self.key.static.mods.graphs.split(self.tables or (), self.numbers or ())

    def evaluated(
        self, graph: Graph, arguments: Any, shape: torch.Size, *given: Tensor
    ) -> tuple[Tensor, ...]:
        places = [torch.arange(n).view(-1, *(1,) * (3 - i)) for i, n in enumerate(shape)]
        # Tables of one element stand for a single value.
        tables = [x[0] if not t.rank else x for x, t in zip(arguments[0], graph.captures)]
        b, h, q, kv = places
        return evaluate(lowered(graph), (tables, arguments[1]), torch.float32, (b, h, q, kv), *given)

    def before(self, scores: Tensor) -> Tensor:
        return scores if self.bias is None else scores + self.bias.float()

    def apply(self, before: Tensor) -> Tensor:
        graph = self.key.static.mods.graphs.score
        if graph is None:
            return before
        (found,) = self.evaluated(graph, self.parts.score, before.shape, before)
        return found.expand_as(before)

    def hidden(self, shape: torch.Size) -> Tensor:
        graph, seen = self.key.static.mods.graphs.mask, torch.ones((), dtype=torch.bool)
        if graph is not None:
            (seen,) = self.evaluated(graph, self.parts.mask, shape)
        if self.lists is not None:
            visited, partial = self.listed(shape)
            seen = visited & (seen | ~partial)
        return ~seen

    def listed(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Which pairs are visited, and which are in partial blocks."""
        assert self.lists is not None
        num, entries = self.lists
        assert num.dtype == entries.dtype == torch.int32
        tile_m, tile_n = self.key.tile.tile_m, self.key.tile.tile_n  # type: ignore[union-attr]
        visited, partial = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
        group = shape[1] // num.shape[1]
        assert num.shape == (shape[0], num.shape[1], -(-shape[3] // tile_n))
        for b in range(num.shape[0]):
            for h in range(num.shape[1]):
                for n in range(num.shape[2]):
                    listed = entries[b, h, n, : num[b, h, n]].tolist()
                    heads = [one >> HEAD_SHIFT for one in listed]
                    lasts = [i for i, one in enumerate(listed) if one & IS_LAST]
                    assert heads == sorted(heads) and all(0 <= head < group for head in heads)
                    assert lasts == [
                        i for i in range(len(heads)) if i + 1 == len(heads) or heads[i] != heads[i + 1]
                    ]
                    for one in listed:
                        m = (one >> M_BLOCK_SHIFT) & ((1 << (HEAD_SHIFT - M_BLOCK_SHIFT)) - 1)
                        assert m * tile_m < shape[2]
                        at = (
                            b, h * group + (one >> HEAD_SHIFT), slice(m * tile_m, (m + 1) * tile_m),
                            slice(n * tile_n, (n + 1) * tile_n),
                        )  # fmt: skip
                        assert not visited[at].any()
                        visited[at], partial[at] = True, bool(one & IS_PARTIAL)
        return visited, partial

    def differentiate(self, ds: Tensor, before: Tensor, p: Tensor) -> Tensor:
        """The gradient of `before`; bias and tables receive theirs."""
        mods = self.key.static.mods
        if mods.graphs.score is not None:
            gradient = mods.graphs.gradient(mods.captures_needing_grad)
            found = self.evaluated(gradient.graph, self.parts.gradient, ds.shape, before, ds)
            for load in gradient.loads:
                into = (self.dtables or [])[mods.captures_needing_grad.index(load.capture)]
                grad = found[load.output].expand_as(ds).masked_fill(p == 0, 0.0)
                if not load.indices:
                    into += grad.sum()
                    continue
                where = [
                    found[i].expand_as(ds).clamp(0, n - 1)
                    for i, n in zip(load.indices, into.shape, strict=True)
                ]
                into.index_put_(where, grad, accumulate=True)
            ds = found[0].expand_as(ds).masked_fill(p == 0, 0.0)
        if self.dbias is not None:
            strides = self.dbias.stride()
            shared = [i for i in range(4) if strides[i] == 0 or self.dbias.shape[i] == 1]
            one = self.dbias[tuple(slice(1) if i in shared else slice(None) for i in range(4))]
            grad = ds.sum(dim=shared, keepdim=True) if shared else ds
            one.copy_(one + grad if mods.dbias_accumulates else grad)
        return ds
