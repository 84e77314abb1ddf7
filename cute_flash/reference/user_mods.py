"""What a user's functions and a bias make of a block of scores, in torch: part of the CPU path.

Blocks are (batch, Hkv, group * rows, keys), as in `reference`; within, (batch, Hkv, group, rows, keys).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash.score_mod.block_mask import FULL, PARTIAL, BlockMask
from cute_flash.score_mod.bound import GraphArguments, Graphs
from cute_flash.score_mod.evaluate import clamp_indices, evaluate


class Sums:
    """Gradients that are added up over blocks: of the bias and of captured tables, where wanted."""

    def __init__(
        self, written: Written, wants_bias: bool, wanted: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.dbias = None
        if wants_bias:
            assert written.bias is not None
            self.dbias = torch.zeros(written.bias.shape, dtype=dtype, device=written.bias.device)
        self.wanted = wanted  # of the tables of the score's graph
        tables = written.parts.score[0]
        self.dtables = {i: torch.zeros(tables[i].shape, dtype=dtype, device=tables[i].device) for i in wanted}


@dataclass(frozen=True, eq=False)
class Written:
    """What was asked for. The bias has four dimensions, those that it does not tell apart of size 1."""

    graphs: Graphs
    parts: GraphArguments
    bias: Tensor | None = None
    block_map: BlockMask | None = None
    first: int = 0  # sequence of a packed batch that is the first here
    sums: Sums | None = None

    @property
    def extra_blocks(self) -> int:
        """Temporaries of a block of scores, in elements of fp32 a score."""
        found = 2
        if self.graphs.score is not None:
            found += 2 * self.graphs.score.ops_per_score
            if self.sums is not None:
                found += 2 * self.graphs.gradient(self.wanted).graph.ops_per_score
        return found + 2 * (0 if self.graphs.mask is None else self.graphs.mask.ops_per_score)

    @property
    def wanted(self) -> tuple[int, ...]:
        return () if self.sums is None else self.sums.wanted


class PartWritten:
    """For one part of the batch and key heads."""

    def __init__(self, written: Written, b: range, h: range, group: int, dtype: torch.dtype) -> None:
        self.written, self.dtype = written, dtype
        self.b, self.h = b, range(h.start * group, h.stop * group)
        self.shape = len(h), group

    def apply(self, S: Tensor, rows: range, keys: range) -> tuple[Tensor, Tensor | None]:
        """S with the bias, after score_mod; and before it, for its gradient."""
        if self.written.bias is not None:
            S = S.clone()
            self._five(S, rows).add_(self._bias(self.written.bias, rows, keys))
        graph = self.written.graphs.score
        if graph is None:
            return S, None
        before = self._five(S, rows)
        places = self._places(rows, keys, S.device)
        (found,) = evaluate(graph, self.written.parts.score, self.dtype, places, before)
        return found.expand_as(before).clone().flatten(2, 3), S

    def differentiate(self, dS: Tensor, before: Tensor | None, P: Tensor, rows: range, keys: range) -> Tensor:
        """The gradient of S as it was given to `apply`; what bias and tables receive is added to the sums."""
        written = self.written
        if before is not None:
            gradient = written.graphs.gradient(written.wanted)
            places = self._places(rows, keys, dS.device)
            # A weight of 0 passes nothing on, also where the function has no derivative.
            nothing = self._five(P == 0, rows)
            given = self._five(before, rows), self._five(dS, rows)
            found = evaluate(gradient.graph, written.parts.gradient, self.dtype, places, *given)
            found = tuple(x.expand_as(given[0]) if x.is_floating_point() else x for x in found)
            for load in gradient.loads:
                assert written.sums is not None
                into = written.sums.dtables[load.capture]
                grad = found[load.output].masked_fill(nothing, 0.0)
                _add_at(into, [found[i] for i in load.indices], grad)
            dS = found[0].masked_fill(nothing, 0.0).flatten(2, 3)
        if written.sums is not None and written.sums.dbias is not None:
            into = self._slice(written.sums.dbias, rows, keys)
            grad = self._five(dS, rows).flatten(1, 2)
            into += grad.sum_to_size(into.shape)
        return dS

    @property
    def hides(self) -> bool:
        return self.written.graphs.mask is not None or self.written.block_map is not None

    def hidden(self, rows: range, keys: range, device: torch.device) -> Tensor | None:
        """What mask_mod and the block map hide, to broadcast with five dimensions; None: nothing."""
        graph, block_map, seen = self.written.graphs.mask, self.written.block_map, None
        if graph is not None:
            places = self._places(rows, keys, device)
            (seen,) = evaluate(graph, self.written.parts.mask, self.dtype, places)
        if block_map is not None:
            status = self._status(block_map, rows, keys)
            cut = status == PARTIAL
            seen = (status == FULL) | (cut if seen is None else cut & seen)
        return None if seen is None else ~seen

    def hide_(self, block: Tensor, rows: range, keys: range, value: float) -> None:
        hidden = self.hidden(rows, keys, block.device)
        if hidden is not None:
            self._five(block, rows).masked_fill_(hidden, value)

    def _five(self, block: Tensor, rows: range) -> Tensor:
        return block.unflatten(2, (-1, len(rows)))

    def _places(
        self, rows: range, keys: range, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        b, h, q, kv = (torch.arange(x.start, x.stop, device=device) for x in (self.b, self.h, rows, keys))
        heads = h.view(1, *self.shape, 1, 1)
        return (b + self.written.first).view(-1, 1, 1, 1, 1), heads, q.view(-1, 1), kv

    def _slice(self, x: Tensor, rows: range, keys: range) -> Tensor:
        """The part of a (B or 1, H or 1, Sq or 1, Sk or 1) tensor that a block needs."""
        for dim, part in enumerate((self.b, self.h, rows, keys)):
            if x.shape[dim] > 1:
                x = x.narrow(dim, part.start, len(part))
        return x

    def _bias(self, bias: Tensor, rows: range, keys: range) -> Tensor:
        part = self._slice(bias, rows, keys).to(self.dtype)
        return part.unflatten(1, self.shape) if part.shape[1] > 1 else part.unsqueeze(1)

    def _status(self, block_map: BlockMask, rows: range, keys: range) -> Tensor:
        status = block_map.status
        status = status[self.b.start : self.b.stop] if status.shape[0] > 1 else status
        status = status[:, self.h.start : self.h.stop] if status.shape[1] > 1 else status
        i = torch.arange(rows.start, rows.stop, device=status.device) // block_map.tile_m
        j = torch.arange(keys.start, keys.stop, device=status.device) // block_map.tile_n
        part = status[:, :, i][..., j]
        return part.unflatten(1, self.shape) if part.shape[1] > 1 else part.unsqueeze(1)


def _add_at(into: Tensor, indices: list[Tensor], grad: Tensor) -> None:
    """into[indices] += grad, where several may go to one place."""
    if not indices:
        into += grad.sum()
        return
    places = torch.broadcast_tensors(*clamp_indices(into, indices))
    shape = (1,) * (grad.dim() - places[0].dim()) + tuple(places[0].shape)
    grad = grad.sum_to_size(shape)
    into.index_put_([x.reshape(shape) for x in places], grad, accumulate=True)
