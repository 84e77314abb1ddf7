"""A stand-in for each kernel: computes its results in fp32 on CPU tensors from its named arguments.

dQ is accumulated in row order, not in the accumulator order of the kernels. Stand-ins for kernels of a varlen batch
compute each tile from its row of the tile list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cute_flash.planning.plan import CompileKey
from cute_flash.planning.varlen import padded_block
from cute_flash.reference import tiled, user_mods
from cute_flash.reference.grads import FeatureGrads
from cute_flash.reference.score import ScoreFeatures
from cute_flash.runtime.binder import compact_strides
from cute_flash.score_mod.block_mask import EMPTY, FULL, PARTIAL, BlockIndices, BlockMask
from cute_flash.score_mod.block_sparse import HEAD_SHIFT, IS_LAST, IS_PARTIAL, M_BLOCK_SHIFT
from cute_flash.score_mod.evaluate import indices_in_bounds
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from tests.fakes import varlen_model
from tests.fakes.checks import dalibi_warps, graphs_of
from tests.fakes.varlen_model import VarlenTile

LOG2_E = math.log2(math.e)

Arguments = dict[str, Any]


def kernel_of(name: str) -> Callable[[CompileKey, Arguments], None]:
    """The stand-in for a kernel of `planning.registry`."""
    for prefix, kernel in _KERNELS.items():
        if name.startswith(prefix):
            return kernel
    raise KeyError(name)


def _dropout_origin(a: Arguments) -> tuple[int, ...]:
    """The first row, key and head, and the number of heads, from the words of the Philox counter."""
    return a["dropout_first_query"] * 4, a["dropout_first_key"] * 4, a["dropout_first_head"], a["dropout_heads"]


def band_of(key: CompileKey, a: Arguments) -> Band:
    """The mask of a launch; operands that the kernel does not read have no effect."""
    bounded = {"window_left": "has_left", "window_right": "has_right", "attention_chunk": "has_chunk"}
    return Band(*(a[name] if getattr(key.static, flag) else None for name, flag in bounded.items()))


def args_of(key: CompileKey, a: Arguments, block_mask: BlockMask | None = None) -> AttentionArgs:
    """The call that the arguments of a main kernel describe."""
    static, dropout_scale = key.static, a["dropout_scale"]
    mods = static.mods
    band = band_of(key, a)
    args = AttentionArgs(
        scale=a["scale"],
        window_left=band.left,
        window_right=band.right,
        attention_chunk=band.chunk,
        softcap=a["softcap"] or 0.0,
        alibi=a["alibi_slopes"],
        sinks=a["sinks"],
        dropout=0.0 if dropout_scale is None else 1 - 1 / dropout_scale,
        rng=a["rng"],
        dropout_origin=_dropout_origin(a) if static.dropout_origin else (),
        bias=a["bias"],
        block_mask=() if block_mask is None else block_mask.tensors,
        block_mask_sizes=() if block_mask is None else block_mask.sizes,
    )
    if mods is None:
        return args
    tables = [table for graph in graphs_of(static) for table in graph.captures]
    return args._replace(
        mod_graphs=mods.graphs.text,
        captures=tuple(_as_captured(x, table) for x, table in zip(a["captures"] or (), tables)),
        scalars=tuple(a["scalars"] or ()),
        needs_grad=(False, *(i in mods.captures_needing_grad for i in range(len(tables)))),
    )


def _as_captured(x: Tensor, table: Any) -> Tensor:
    """A captured tensor as the call has it: bools instead of bytes, and 0-d tensors."""
    x = x.view(torch.bool) if table.dtype == "bool" else x
    return x if table.rank else x[0]


# ---- forward


def _forward(key: CompileKey, a: Arguments) -> None:
    if key.static.varlen:
        _varlen_forward(key, a)
        return
    seqlen_q = a["seqlen_q"] or a["q"].shape[2]
    group = a["q"].shape[2] // seqlen_q
    assert key.static.pack_gqa == (group > 1 and key.static.is_bounded)
    q = _unpack_gqa(a["q"], group)
    shape = torch.Size((*q.shape[:3], a["k"].shape[2]))
    args = args_of(key, a, _fwd_block_mask(key, a["block_indices"], shape))
    out, lse = (torch.full_like(_unpack_gqa(x, group), torch.nan) for x in (a["out"], a["lse"]))
    tiled.forward(q, a["k"], a["v"], args, out, lse, a["max_logit"])
    for target, values in ((a["out"], out), (a["lse"], lse)):
        target.unflatten(2, (group, seqlen_q)).copy_(values.unflatten(1, (-1, group)))


def _unpack_gqa(x: Tensor, group: int) -> Tensor:
    """(B, H / group, group S, ...) as (B, H, S, ...)."""
    return x.unflatten(2, (group, -1)).flatten(1, 2)


def _fwd_block_mask(key: CompileKey, lists: list[Tensor] | None, shape: torch.Size) -> BlockMask | None:
    if lists is None:
        return None
    tile = key.static.mods.block_mask_tile
    full, partial = (BlockIndices(*lists[i : i + 2]) for i in (0, 2))
    return BlockMask(*tile, *shape[2:], partial, full)


def _varlen_forward(key: CompileKey, a: Arguments) -> None:
    args, tile_m = args_of(key, a), key.tile.tile_m
    for tile in varlen_model.read(a["q_tile_list"]):
        q, k, v = _sequence(tile, a["q"], a["k"], a["v"])
        out, lse = q.new_empty(*q.shape[:3], v.shape[3], dtype=a["out"].dtype), torch.empty(q.shape[:3])
        tiled.forward(q, k, v, args, out, lse, a["max_logit"], tile.sequence)
        first = tile.block * tile_m
        rows = _rows_of(tile, tile_m)
        a["out"][rows] = out[0, :, first : first + tile_m].transpose(0, 1)
        a["lse"][:, rows] = lse[0, :, first : first + tile_m]


def _sequence(tile: VarlenTile, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The (1, H, S, D) tensors of a tile's sequence."""
    queries = slice(tile.q_begin, tile.q_begin + tile.q_len)
    keys = slice(tile.k_begin, tile.k_begin + tile.k_len)
    return [x[span].transpose(0, 1)[None] for x, span in ((q, queries), (k, keys), (v, keys))]


def _rows_of(tile: VarlenTile, tile_m: int) -> slice:
    """The rows of a query tile in (T, ...) tensors."""
    first = tile.block * tile_m
    return slice(tile.q_begin + first, tile.q_begin + min(first + tile_m, tile.q_len))


# ---- varlen schedulers


def _scheduler_fwd(key: CompileKey, a: Arguments) -> None:
    _write_tile_list(a, of_keys=False)


def _scheduler_bwd(key: CompileKey, a: Arguments) -> None:
    _write_tile_list(a, of_keys=True)
    # The workspace has separate blocks for rows after the last sequence.
    _write_tile_list(a, of_keys=False, numbers_rest=True)


def _write_tile_list(a: Arguments, of_keys: bool, numbers_rest: bool = False) -> None:
    offsets, totals = (a["cu_seqlens_q"], a["cu_seqlens_k"], a["seqused_k"]), (a["total_q"], a["total_k"])
    infos = varlen_model.sequences(*offsets, totals, of_keys, numbers_rest)
    band, tile = Band(a["scheduler_left"], a["scheduler_right"], a["attention_chunk"]), (a["tile_m"], a["tile_n"])
    if of_keys:
        band, tile = band.of_keys, tile[::-1]
    tiles = varlen_model.tiles(infos, band, tile, of_keys, a["tile_order"])
    varlen_model.write(a["kv_tile_list" if of_keys else "q_tile_list"], list(tiles))


# ---- backward


def _q_tiles(key: CompileKey, a: Arguments) -> Iterator[tuple[VarlenTile, slice, slice]]:
    """Each tile of a varlen batch, its rows among the tokens and its rows in the workspace."""
    tile_m = key.tile.tile_m
    for tile in varlen_model.read(a["q_tile_list"]):
        first = (padded_block(tile.q_begin, tile.sequence, tile_m) + tile.block) * tile_m
        yield tile, _rows_of(tile, tile_m), slice(first, first + tile_m)


def _has_progress(key: CompileKey, num_queries: int) -> bool:
    """Whether dq_progress says which m_blocks of dQ were visited: by claims, or by semaphores."""
    return key.tile.needs_wgmma and (key.static.deterministic or num_queries <= key.tile.max_queries_claimed)


def _stores_first(key: CompileKey, num_queries: int) -> bool:
    """Whether the first K/V tile stores dQ of an m_block, instead of adding to zeros."""
    if not _has_progress(key, num_queries):
        return False
    return not key.static.deterministic or key.tile.first_tile_stores(key.static)


def _prepare_dq(key: CompileKey, dq_accum: Tensor, num_queries: int) -> None:
    """Zero the accumulators of dQ, as the preprocess kernel does; without zeros, keep them or fill them with NaN.

    Deterministic accumulators are kept, because the host may have allocated zeros.
    """
    if not _has_progress(key, num_queries):
        dq_accum.zero_()
    elif not key.static.deterministic:
        dq_accum.fill_(torch.nan)


def _preprocess(key: CompileKey, a: Arguments) -> None:
    out, dout, lse, dlse = a["out"], a["dout"], a["lse"], a["dlse"]
    if not key.static.varlen:
        _preprocess_rows(a, slice(None), out, dout, lse, dlse)
        _prepare_dq(key, a["dq_accum"], out.shape[2])
        if a["dq_progress"] is not None:
            a["dq_progress"].zero_()
        return
    for tile, rows, block in _q_tiles(key, a):
        parts = (x[rows].transpose(0, 1)[None] for x in (out, dout))
        statistics = (None if x is None else x[None, :, rows] for x in (lse, dlse))
        _preprocess_rows(a, block, *parts, *statistics)
        index = block.start // key.tile.tile_m
        _prepare_dq(key, a["dq_accum"][0, :, index], tile.q_len)
        if a["dq_progress"] is not None:
            a["dq_progress"][0, :, index] = 0


def _preprocess_rows(a: Arguments, block: slice, out, dout, lse, dlse) -> None:
    """LSE in units of log2, and Δ, of (B, H, S) rows; the remaining rows of the last block are padding."""
    has_keys, num = lse > -torch.inf, lse.shape[2]
    lse_log2, delta = a["lse_log2"][:, :, block], a["delta"][:, :, block]
    lse_log2.fill_(torch.inf)
    lse_log2[:, :, :num] = torch.where(has_keys, lse * LOG2_E, torch.inf)
    delta.zero_()
    dots = (out.float() * dout.float()).sum(-1)
    delta[:, :, :num] = dots if dlse is None else dots - dlse * has_keys


def _backward(key: CompileKey, a: Arguments) -> None:
    if a["dq_progress"] is not None:
        # In a varlen batch, blocks without queries are neither zeroed nor read.
        assert key.static.varlen or not a["dq_progress"].any()
    if key.static.varlen:
        _varlen_backward(key, a)
    else:
        _dense_backward(key, a)
    if key.static.deterministic and not key.tile.needs_wgmma:
        a["dq_progress"].fill_(7)  # the preprocess kernel of the next call must reset it


def _dense_backward(key: CompileKey, a: Arguments) -> None:
    q, k = a["q"], a["k"]
    (batch, heads, sq, _), sk = q.shape, k.shape[2]
    block_mask = None
    if a["block_indices"] is not None:
        block_mask = _bwd_block_mask(key, *a["block_indices"], torch.Size((batch, heads, sq, sk)))
    args = args_of(key, a, block_mask)
    grads = FeatureGrads(captures={i: torch.zeros(args.captures[i].shape) for i in args.captures_needing_grad})
    if a["dalibi_partial"] is not None:
        grads.alibi = torch.zeros(batch, heads)
    if a["dbias"] is not None:
        grads.bias = torch.zeros(batch, heads, sq, sk)
    with _stored_terms(a["dcapture_terms"]):
        dq, dk, dv = _gradients(
            args, grads, range(batch), (q, k, a["v"], a["dout_cast"]), a["lse_log2"][:, :, :sq], a["delta"][:, :, :sq],
            range(sk), sk,
        )  # fmt: skip
    _add_dq(key, a, 0, dq)
    a["dk"].copy_(dk)
    a["dv"].copy_(dv)
    if a["dalibi_partial"] is not None:
        # One part holds the full sum.
        a["dalibi_partial"][:, :, -1] = grads.alibi
    if a["dbias"] is not None:
        _store_dbias(a["dbias"], grads.bias, key.static.mods.dbias_accumulates)
        if key.static.mods.dbias_terms:
            a["dbias"].masked_fill_(~_visited(key, a, sq, sk), torch.nan)  # left uninitialized
    for into, grad in zip(a["dcaptures"] or (), grads.captures.values(), strict=True):
        into += grad.view_as(into)


@contextmanager
def _stored_terms(dcapture_terms: list[Tensor] | None) -> Iterator[None]:
    """With deterministic gradients, the terms that scores add to captured tensors are stored, not summed."""
    if dcapture_terms is None:
        yield
        return
    loads = zip(*dcapture_terms, strict=True)

    def store(total: Tensor, indices: list[Tensor], grad: Tensor) -> None:
        terms, elements = next(loads)
        terms.copy_(grad.flatten(1, 2))
        strides = compact_strides(total.shape)
        for index, stride in zip(indices_in_bounds(total, indices), strides, strict=True):
            elements += (index.expand_as(grad) * stride).flatten(1, 2).int()

    with mock.patch.object(user_mods, "_add_at", store):
        yield
    assert next(loads, None) is None


def _varlen_backward(key: CompileKey, a: Arguments) -> None:
    args, tile_m, tile_n = args_of(key, a), key.tile.tile_m, key.tile.tile_n
    dalibi = a["dalibi_partial"]
    for tile in varlen_model.read(a["kv_tile_list"]):
        first = tile.block * tile_n
        span = range(first, min(first + tile_n, tile.k_len))
        keys = slice(tile.k_begin + span.start, tile.k_begin + span.stop)
        queries = slice(tile.q_begin, tile.q_begin + tile.q_len)
        begin = padded_block(tile.q_begin, tile.sequence, tile_m) * tile_m
        padded = slice(begin, begin + tile.q_len)
        inputs = [
            x[rows].transpose(0, 1)[None]
            for x, rows in ((a["q"], queries), (a["k"], keys), (a["v"], keys), (a["dout_cast"], queries))
        ]
        grads = FeatureGrads(captures={i: torch.zeros(args.captures[i].shape) for i in args.captures_needing_grad})
        if dalibi is not None:
            grads.alibi = torch.zeros(tile.sequence + 1, a["q"].shape[1])
        statistics = a["lse_log2"][:, :, padded], a["delta"][:, :, padded]
        batch = range(tile.sequence, tile.sequence + 1)
        dq, dk, dv = _gradients(args, grads, batch, inputs, *statistics, span, tile.k_len)
        a["dk"][keys] = dk[0].transpose(0, 1).to(a["dk"].dtype)
        a["dv"][keys] = dv[0].transpose(0, 1).to(a["dv"].dtype)
        if tile.q_len:
            _add_dq(key, a, begin, dq)
        for into, grad in zip(a["dcaptures"] or (), grads.captures.values(), strict=True):
            into += grad.view_as(into)
        if dalibi is not None and tile.q_len:
            # One part of the tile holds the full sum.
            warps, block = dalibi_warps(key), padded_block(tile.k_begin, tile.sequence, tile_n)
            part = (block + tile.block) * warps + tile.block % warps
            assert not dalibi[0, :, part].any(), "two tiles in one place"
            assert grads.alibi is not None
            dalibi[0, :, part] = grads.alibi[tile.sequence]


def _gradients(
    args: AttentionArgs, grads: FeatureGrads, batch: range, inputs: Any, lse_log2: Tensor, delta: Tensor, keys: range,
    seqlen_k: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ without the scale, dK and dV of all rows and some keys, (B, H, S, D); adds to `grads`."""
    q, k, v, dout = inputs
    heads_kv, group, sq = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    Q, dO, lse, delta = (x.float().unflatten(1, (-1, group)).flatten(2, 3) for x in (q, dout, lse_log2, delta))
    K, V = k.float(), v.float()
    features = ScoreFeatures(args, batch, range(heads_kv), group, (sq, seqlen_k), torch.float32, q.shape[1])
    block = features.block(range(sq), keys)
    P = (block.apply(Q @ K.mT * args.scale) - lse[..., None] / LOG2_E).exp()
    block.apply_mask_(P, 0.0)
    Z = block.dropout_factors()
    Z = torch.ones(()) if Z is None else Z
    dV = (P * Z).mT @ dO
    dS = block.backward(P * (dO @ V.mT * Z - delta[..., None]), P, grads)
    dQ = (dS @ K).unflatten(2, (group, -1)).flatten(1, 2)
    return dQ, dS.mT @ Q * args.scale, dV


def _accumulated_rows(key: CompileKey, a: Arguments) -> Tensor:
    """dq_accum as (B, H, rows, columns of a tile)."""
    return a["dq_accum"].view(*a["dq_accum"].shape[:2], -1, key.tile.head_dim)


def _add_dq(key: CompileKey, a: Arguments, begin: int, dq: Tensor) -> None:
    """Add dq (B, H, rows, columns) to the accumulators from row `begin` on.

    With claims or semaphores, blocks without a gradient are not visited, and the first addition to a block may store.
    """
    rows, tile_m, (num, width) = _accumulated_rows(key, a), key.tile.tile_m, dq.shape[2:]
    if not _has_progress(key, num):
        rows[:, :, begin : begin + num, :width] += dq
        return
    for first in range(0, num, tile_m):
        one, block = dq[:, :, first : first + tile_m], (begin + first) // tile_m
        for b, h in torch.cartesian_prod(*map(torch.arange, dq.shape[:2])).tolist():
            if one[b, h].any():
                target = rows[b, h, block * tile_m : (block + 1) * tile_m]
                if _stores_first(key, num) and not a["dq_progress"][b, h, block]:
                    target.zero_()
                target[: one.shape[2], :width] += one[b, h]
                a["dq_progress"][b, h, block] = 1


def _store_dbias(dbias: Tensor, grad: Tensor, accumulates: bool) -> None:
    """Store the gradient of the bias, summed over the dimensions in which `dbias` has a stride of 0."""
    shared = [i for i in range(4) if dbias.stride(i) == 0 or dbias.shape[i] == 1]
    one = dbias[tuple(slice(1) if i in shared else slice(None) for i in range(4))]
    total = grad.sum(dim=shared, keepdim=True) if shared else grad
    one.copy_(one + total if accumulates else total)


def _sum_dbias(key: CompileKey, a: Arguments) -> None:
    """The sums of the terms, without terms of blocks that the band excludes."""
    terms, sums = a["dbias_terms"].float(), a["dbias_sum"]
    shared = [i for i in range(2) if sums.shape[i] != terms.shape[i]]
    sums.copy_(torch.where(_visited(key, a, *terms.shape[2:]), terms, 0.0).sum(shared, keepdim=True))


def _visited(key: CompileKey, a: Arguments, sq: int, sk: int) -> Tensor:
    """(Sq, Sk): whether a score is in a block that the K/V tiles of the backward visit."""
    band = band_of(key, a).of_keys
    tile_m, tile_n = key.tile.tile_m, key.tile.tile_n
    visited = torch.zeros(sq, sk, dtype=torch.bool)
    for n_block in range(-(-sk // tile_n)):
        blocks = band.blocks(n_block, tile_n, tile_m, sk, sq)
        visited[blocks.begin * tile_m : blocks.end * tile_m, n_block * tile_n : (n_block + 1) * tile_n] = True
    return visited


def _bwd_block_mask(key: CompileKey, num: Tensor, indices: Tensor, *ranks_and_shape: Any) -> BlockMask:
    """The block mask in units of kernel tiles, from the index list of each K/V tile; see `score_mod.block_sparse`."""
    *ranks, shape = ranks_and_shape
    (batch, heads, sq, sk), tile = shape, (key.tile.tile_m, key.tile.tile_n)
    m_blocks, group = -(-sq // tile[0]), heads // num.shape[1]
    status = torch.full((batch, heads, m_blocks, num.shape[2]), EMPTY, dtype=torch.uint8)
    for b, h, n in torch.cartesian_prod(*map(torch.arange, num.shape)).tolist():
        listed = indices[b, h, n, : num[b, h, n]].tolist()
        own_heads = [one >> HEAD_SHIFT for one in listed]
        assert own_heads == sorted(own_heads) and all(0 <= head < group for head in own_heads)
        ends = [i for i in range(len(listed)) if own_heads[i] not in own_heads[i + 1 :]]
        assert [i for i, one in enumerate(listed) if one & IS_LAST] == ends
        for one, head in zip(listed, own_heads, strict=True):
            m_block = (one >> M_BLOCK_SHIFT) & ((1 << (HEAD_SHIFT - M_BLOCK_SHIFT)) - 1)
            assert status[b, h * group + head, m_block, n] == EMPTY, "a block is listed twice"
            status[b, h * group + head, m_block, n] = PARTIAL if one & IS_PARTIAL else FULL
    for rank in ranks:
        is_listed = status != EMPTY
        for coord in is_listed.nonzero().tolist():
            b, h, m, n = coord
            assert rank[b, h, m, n] == is_listed[b, h, m, n + 1 :].sum(), "later tiles add first"
    return BlockMask.of_status(status, *tile, sq, sk)


def _postprocess(key: CompileKey, a: Arguments) -> None:
    dq, tile_m = a["dq"], key.tile.tile_m

    def rows(first: int, num: int) -> Tensor:
        """dQ of a sequence whose first row in the workspace is `first`."""
        found = _accumulated_rows(key, a)[:, :, first : first + num, : dq.shape[-1]].clone()
        if _has_progress(key, num):
            for block in range(-(-num // tile_m)):
                unwritten = a["dq_progress"][:, :, first // tile_m + block] == 0
                found[:, :, block * tile_m : (block + 1) * tile_m][unwritten] = 0
        return found * a["dq_scale"]

    if key.static.varlen:
        for tile, tokens, block in _q_tiles(key, a):
            values = rows(block.start - tile.block * tile_m, tile.q_len)
            own = slice(tile.block * tile_m, tile.block * tile_m + tokens.stop - tokens.start)
            dq[tokens] = values[0, :, own].transpose(0, 1).to(dq.dtype)
    else:
        dq.copy_(rows(0, dq.shape[2]))
    if a.get("dq_progress") is not None:
        a["dq_progress"].fill_(7)  # the preprocess kernel of the next call must reset it


# ---- fp32


def _split(key: CompileKey, a: Arguments) -> None:
    """Write the largest row norm of each head and sequence, and the two fp16 pieces of the scaled rows."""
    names = [name for name in a if f"{name}_pieces" in a]
    assert not a["norms"].any()
    for i, name in enumerate(names):
        pieces = a[f"{name}_pieces"]
        pieces.fill_(torch.nan)  # padding and unused keys have none
        for b, x, rows in _sequences(key, a, name):
            width, heads = pieces.shape[3] // 2, x.shape[0]
            # NaN and infinity do not count.
            norms = torch.linalg.vector_norm(x.double().nan_to_num(0, 0, 0), dim=-1).amax(-1).float()
            a["norms"][i, b, :heads] = norms
            scaled = x / _factor(norms)[..., None, None]
            rows.zero_()
            rows[..., : x.shape[2]] = scaled
            rows[..., width : width + x.shape[2]] = scaled - scaled.half().float()


def _sequences(key: CompileKey, a: Arguments, name: str) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(index, rows (H, S, D) of a tensor, their pieces) of each sequence that is not empty."""
    pieces = a[f"{name}_pieces"]
    if not key.static.varlen:
        yield from ((b, a[name][b], pieces[b]) for b in range(len(pieces)))
        return
    of_keys = name in ("k", "v")
    offsets = a["cu_seqlens_k" if of_keys else "cu_seqlens_q"].tolist()
    for b, (begin, end) in enumerate(pairwise(offsets)):
        if of_keys and a["seqused_k"] is not None:
            end = begin + min(int(a["seqused_k"][b]), end - begin)
        if end > begin:
            yield b, a[name][begin:end].transpose(0, 1), pieces[0, :, begin:end]


def _factor(norms: Tensor) -> Tensor:
    """The power of two that a head is divided by: its rows then have norms below 2^14."""
    return torch.exp2(torch.frexp(norms.clamp(min=1e-30)).exponent.float() - 14)


def _with_tensors(key: CompileKey, a: Arguments) -> Arguments:
    """The arguments, with fp32 tensors in place of pieces."""
    static, names = key.static, ("q", "k", "v", "dout_cast")
    a = type(a)(a)
    for i, name in enumerate(names):
        if f"{name}_pieces" not in a:
            continue
        pieces, width = a[f"{name}_pieces"], static.head_dim if name in ("q", "k") else static.width_v
        high, low = (x[..., :width].float() for x in pieces.chunk(2, -1))
        factors = _factor(a["norms"][i, :, : pieces.shape[1]])
        if static.varlen:
            factors = factors[_sequence_of_rows(a, name, pieces.shape[2])].T[None, ..., None]
        else:
            factors = factors[..., None, None]
        x = (high + low) * factors
        a[name] = x[0].transpose(0, 1) if static.varlen else x
    return a


def _sequence_of_rows(a: Arguments, name: str, num_rows: int) -> Tensor:
    """The sequence of each row, from the tile list; 0 for rows that belong to no sequence."""
    found = torch.zeros(num_rows, dtype=torch.int64)
    for tile in varlen_model.read(a["q_tile_list"] if "q_tile_list" in a else a["kv_tile_list"]):
        begin, length = (tile.k_begin, tile.k_len) if name in ("k", "v") else (tile.q_begin, tile.q_len)
        found[begin : begin + length] = tile.sequence
    return found


def _forward_fp32(key: CompileKey, a: Arguments) -> None:
    _forward(key, _with_tensors(key, a))


def _backward_fp32(key: CompileKey, a: Arguments) -> None:
    assert (a["norms"][4] > 0).any() or not a["delta"].any()
    _backward(key, _with_tensors(key, a))


def _preprocess_fp32(key: CompileKey, a: Arguments) -> None:
    _preprocess(key, a)
    a["norms"][4] = a["delta"].abs().nan_to_num().amax(-1)


def _merge(key: CompileKey, a: Arguments) -> None:
    """Output and LSE over the keys of all partial outputs."""
    lengths = [x.shape[2] for x in a["partials"]]
    shape, dtype = a["lse"].shape, torch.float64
    total = torch.full(shape, -torch.inf, dtype=dtype)
    for first, length, lse in zip(a["first_rows"], lengths, a["partial_lses"], strict=True):
        rows = slice(first, first + length)
        total[:, :, rows] = torch.logaddexp(total[:, :, rows], lse.to(dtype))
    out = torch.zeros(a["out"].shape, dtype=dtype)
    for first, length, x, lse in zip(a["first_rows"], lengths, a["partials"], a["partial_lses"], strict=True):
        rows = slice(first, first + length)
        is_empty = total[:, :, rows] == -torch.inf
        weight = (lse - total[:, :, rows]).exp().masked_fill(is_empty, 0.0)[..., None]
        out[:, :, rows] += torch.where(weight == 0, 0.0, weight * x)
    a["out"].copy_(out)
    a["lse"].copy_(total)


def _split_keys(key: CompileKey, a: Arguments) -> None:
    """Kernels that split keys are not computed: their arguments are checked."""


_KERNELS = {
    "decode": _split_keys,
    "fwd_split_kv": _split_keys,
    "merge_partials": _merge,
    "split_fp32": _split,
    "fwd_sm80_fp32": _forward_fp32,
    "bwd_sm80_fp32": _backward_fp32,
    "bwd_preprocess_fp32": _preprocess_fp32,
    "fwd_sm": _forward,
    "bwd_preprocess": _preprocess,
    "bwd_postprocess": _postprocess,
    "bwd_sum_dbias": _sum_dbias,
    "bwd_sm": _backward,
    "varlen_scheduler_fwd": _scheduler_fwd,
    "varlen_scheduler_bwd": _scheduler_bwd,
}
