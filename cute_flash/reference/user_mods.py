"""Bias, score_mod, mask_mod and block mask on one block of scores, in torch.

Blocks are (batch, Hkv, group, rows, keys) here: the query heads of a group have a separate dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_flash.reference.grads import FeatureGrads
from cute_flash.score_mod.block_mask import FULL, PARTIAL, BlockMask
from cute_flash.score_mod.evaluate import evaluate, indices_in_bounds
from cute_flash.spec.args import AttentionArgs


class UserMods:
    """The user mods of a call, for some sequences and query heads; `shape` is (Hkv, group) of these heads."""

    def __init__(
        self, args: AttentionArgs, batch: range, heads: range, shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        self.batch, self.heads, self.shape, self.dtype = batch, heads, shape, dtype
        self.bias, self.graphs = args.bias, args.mods
        self.arguments = self.graphs.split(args.captures, args.scalars)
        self.captures_needing_grad = args.captures_needing_grad
        self.block_status: Tensor | None = None
        if args.block_mask:
            block_mask = BlockMask.of_tensors(list(args.block_mask), list(args.block_mask_sizes))
            self.block_status, self.tile = block_mask.status, (block_mask.tile_m, block_mask.tile_n)

    def apply(self, S: Tensor, rows: range, keys: range) -> tuple[Tensor, Tensor | None]:
        """S after bias and score_mod, and S before score_mod for its gradient (None without a score_mod)."""
        if self.bias is not None:
            S = S + self._grouped(self._slice(self.bias, rows, keys).to(self.dtype))
        if self.graphs.score is None:
            return S, None
        indices = self._indices(rows, keys, S.device)
        (after,) = evaluate(self.graphs.score, self.arguments.score, self.dtype, indices, S)
        # A copy, because score_mod may return its argument, or the same value for many scores.
        return after.expand_as(S).clone(), S

    def backward(
        self, dS: Tensor, before: Tensor | None, P: Tensor, rows: range, keys: range, grads: FeatureGrads
    ) -> Tensor:
        """Compute the gradient of the input of `apply` from `dS`, that of its output, and add to `grads`."""
        if before is not None:
            gradient = self.graphs.gradient(self.captures_needing_grad)
            indices = self._indices(rows, keys, dS.device)
            outputs = evaluate(gradient.graph, self.arguments.gradient, self.dtype, indices, before, dS)
            outputs = tuple(x.expand_as(dS) if x.is_floating_point() else x for x in outputs)
            # Where P is 0, the gradient is 0, even if score_mod is not differentiable there.
            is_zero = P == 0
            for load in gradient.loads:
                grad = outputs[load.output].masked_fill(is_zero, 0.0)
                _add_at(grads.captures[load.capture], [outputs[i] for i in load.indices], grad)
            dS = outputs[0].masked_fill(is_zero, 0.0)
        if grads.bias is not None:
            total = self._slice(grads.bias, rows, keys)
            total += dS.flatten(1, 2).sum_to_size(total.shape)
        return dS

    def visible(self, rows: range, keys: range, device: torch.device) -> Tensor | None:
        """The mask of mask_mod and block mask, which broadcasts with a block. None: no score is masked."""
        mask = None
        if self.graphs.mask is not None:
            indices = self._indices(rows, keys, device)
            (mask,) = evaluate(self.graphs.mask, self.arguments.mask, self.dtype, indices)
            mask = mask.expand(torch.broadcast_shapes(mask.shape, (len(rows), len(keys))))
        if self.block_status is None:
            return mask
        status = self._status(self.block_status, rows, keys)
        partial = status == PARTIAL
        # mask_mod is evaluated in partial blocks only.
        return (status == FULL) | (partial if mask is None else partial & mask)

    def _indices(self, rows: range, keys: range, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, h, q_idx and kv_idx of a block."""
        ranges = self.batch, self.heads, rows, keys
        b, h, q, kv = (torch.arange(x.start, x.stop, device=device) for x in ranges)
        return b.view(-1, 1, 1, 1, 1), h.view(1, *self.shape, 1, 1), q.view(-1, 1), kv

    def _slice(self, x: Tensor, *rows_and_keys: range) -> Tensor:
        """A block's part of a (B or 1, H or 1, Sq or 1, Sk or 1) tensor; all rows and keys by default."""
        for dim, part in enumerate((self.batch, self.heads, *rows_and_keys)):
            if x.shape[dim] > 1:
                x = x.narrow(dim, part.start, len(part))
        return x

    def _status(self, status: Tensor, rows: range, keys: range) -> Tensor:
        """EMPTY, PARTIAL or FULL for each score: the status of its block in the block mask."""
        i, j = (torch.arange(x.start, x.stop, device=status.device) for x in (rows, keys))
        return self._grouped(self._slice(status)[:, :, i // self.tile[0]][..., j // self.tile[1]])

    def _grouped(self, x: Tensor) -> Tensor:
        """(batch, heads or 1, rows, keys) as (batch, Hkv or 1, group or 1, rows, keys)."""
        return x.unflatten(1, self.shape) if x.shape[1] > 1 else x.unsqueeze(1)


def _add_at(total: Tensor, indices: list[Tensor], grad: Tensor) -> None:
    """total[indices] += grad, where indices may repeat."""
    if not indices:
        total += grad.sum()
        return
    places = torch.broadcast_tensors(*indices_in_bounds(total, indices))
    shape = (1,) * (grad.dim() - places[0].dim()) + tuple(places[0].shape)
    grad = grad.sum_to_size(shape)
    total.index_put_([x.reshape(shape) for x in places], grad, accumulate=True)
