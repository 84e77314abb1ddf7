"""Stand-ins for the kernels of packed batches: the list of tiles by `tests.packed_model`, and each tile of it
computed by the reference, from nothing but what the list and the arguments say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import operands, packed_cuda
from cute_flash.jit import compile as compiling
from cute_flash.planning import varlen as work
from cute_flash.planning.plan import CompileKey, Plan
from cute_flash.reference import loops
from cute_flash.reference import tiled as reference
from cute_flash.runtime import counters
from cute_flash.spec import arch
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Features
from tests import packed_model
from tests.fake_backward import Terms, slope_warps
from tests.fake_gpu import COUNTER, Extras

LOG2_E = math.log2(math.e)


@dataclass
class FakePacked:
    name: str
    keys: list[CompileKey] = field(default_factory=list)
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def detect(self, index: int | None) -> arch.ArchSpec:
        return arch.ARCHS[self.name]

    def compiled(self, plan: Plan) -> Callable[..., None]:
        return self.compiled_kernel(plan.key)

    def compiled_kernel(self, key: CompileKey) -> Callable[..., None]:
        self.keys.append(key)
        by_name = {"prepare_fwd": _prepare_fwd, "prepare_fwd_early": _prepare_fwd}
        by_name |= {"fwd_sm80": _forward, "fwd_sm90": _forward, "prepare_bwd": _prepare_bwd}
        by_name |= {
            "bwd_preprocess": _before,
            "bwd_sm80": _main,
            "bwd_sm90": _main,
            "bwd_postprocess": _after,
        }
        name = key.kernel
        if name.startswith("bwd_p"):
            name = name.removesuffix("_dlse").removesuffix("_sm80")

        def launch(*args: Any) -> None:
            self.calls.append((key.kernel, args))
            by_name[name.removesuffix("_general").removesuffix("_ordered")](key, *args)

        return launch

    def arguments(self, prefix: str) -> tuple[Any, ...]:
        """Of the last launch of a kernel whose name begins so."""
        return next(args for name, args in reversed(self.calls) if name.startswith(prefix))


def faked(name: str, monkeypatch: pytest.MonkeyPatch) -> FakePacked:
    """In the place of a GPU; memory without a value is filled with what shows."""
    fake = FakePacked(name)
    monkeypatch.setattr(arch, "detect", fake.detect)
    monkeypatch.setattr(compiling, "compiled", fake.compiled)
    monkeypatch.setattr(compiling, "compiled_kernel", fake.compiled_kernel)
    monkeypatch.setattr(counters, "counter", lambda index: (torch.zeros(1), COUNTER))
    monkeypatch.setattr(operands, "current_device", lambda: None)
    monkeypatch.delenv("CUTE_FLASH_KERNELS", raising=False)
    monkeypatch.setattr(Tensor, "new_empty", _poisoned(Tensor.new_empty))
    for maker in ("empty", "empty_like"):
        monkeypatch.setattr(torch, maker, _poisoned(getattr(torch, maker)))
    monkeypatch.setattr(packed_cuda, "_launches", {})
    monkeypatch.setattr(packed_cuda, "_bwd_launches", {})
    return fake


def _poisoned(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        x = make(*args, **kwargs)
        return x.fill_(torch.nan if x.is_floating_point() else 1 << 20)

    return made


def check_rows(key: CompileKey, *tensors: Tensor, dtype: str | None = None) -> None:
    """What the kernels are compiled for: see `kernels/arguments.py`."""
    for x in tensors:
        row, head, element = x.stride()
        assert element == 1 and row % 8 == head % 8 == 0 and 0 <= row * 512 < 1 << 31
        assert x.data_ptr() % 16 == 0
        assert str(x.dtype) == f"torch.{dtype or key.static.dtype}"


def out_dtype(key: CompileKey) -> str:
    return "float32" if key.static.features.out_dtype else key.static.dtype


def check_items(items: Tensor) -> None:
    assert items.dtype == torch.int32 and items.is_contiguous() and items.data_ptr() % 16 == 0


def _prepare_fwd(key, cu_q, cu_k, used, items, total_q, total_k, tile_m, tile_n, left, right, order) -> None:
    assert (used is not None) == key.static.features.seqused_k
    check_items(items)
    runs = packed_model.runs(cu_q, cu_k, used, (total_q, total_k), False)
    found = packed_model.items(runs, Band(left, right), (tile_m, tile_n), False, order)
    packed_model.write(items, list(found))


def _forward(key, q, k, v, out, lse, scale, left, right, *rest) -> None:
    *arguments, items = rest
    arguments, extras = arguments[:-7], arguments[-7:]
    static = key.static
    asked = Extras(*extras)
    asked.check(static.features)
    assert static.features.varlen and not static.features.seqused_k and not static.packs_heads
    is_sm80 = key.kernel == "fwd_sm80_general"
    assert len(arguments) == (1 if is_sm80 else 4)
    assert is_sm80 or arguments[-1] == COUNTER
    assert arguments[0] >= 1 and q.shape[1] % arguments[0] == 0, "sections of query heads"
    check_rows(key, q, k, v)
    check_rows(key, out, dtype=out_dtype(key))
    check_items(items)
    assert lse.is_contiguous() and lse.shape == (q.shape[1], len(q)) and 0 < scale < math.inf
    band = Band(left if static.has_left else None, right if static.has_right else None)
    for item in packed_model.read(items):
        keys = slice(item.k_begin, item.k_begin + item.k_len)
        queries = slice(item.q_begin, item.q_begin + item.q_len)
        sequence = (x[span].transpose(0, 1)[None] for x, span in ((q, queries), (k, keys), (v, keys)))
        score = asked.score(q.shape[1], item.sequence)
        found, found_lse = reference.forward(
            *sequence, band, scale, score, asked.max_logit, out_dtype=out.dtype
        )
        first, tile_m = item.block * key.tile.tile_m, key.tile.tile_m
        rows = slice(item.q_begin + first, min(item.q_begin + first + tile_m, queries.stop))
        out[rows] = found[0, :, first : first + tile_m].transpose(0, 1)
        lse[:, rows] = found_lse[0, :, first : first + tile_m]


# Gradients: sums of dQ are kept by rows, in no order of accumulators.


def _prepare_bwd(key, cu_q, cu_k, used, keys, queries, total_q, total_k, tile_m, tile_n, *rest) -> None:
    left, right, order = rest
    assert (used is not None) == key.static.features.seqused_k
    for target, tiles, of_keys in ((keys, (tile_n, tile_m), True), (queries, (tile_m, tile_n), False)):
        check_items(target)
        runs = packed_model.runs(cu_q, cu_k, used, (total_q, total_k), of_keys)
        if not of_keys:
            # What comes after the last sequence has a number of its own.
            runs[-1] = runs[-1]._replace(sequence=len(cu_q) - 1)
        band = Band(right, left) if of_keys else Band(left, right)
        packed_model.write(target, list(packed_model.items(runs, band, tiles, of_keys, order)))


def _blocks(key: CompileKey, item: packed_model.Item) -> slice:
    """Rows of the padded workspace, from the first of the sequence on."""
    tile_m = key.tile.tile_m
    first = work.padded_block(item.q_begin, item.sequence, tile_m) * tile_m
    return slice(first, first + work.ceil_div(item.q_len, tile_m) * tile_m)


def _before(key, out, dout, lse, lse_log2, d, sums, turns, dlse, items) -> None:
    assert key.static.features == Features(varlen=True, out_dtype=key.static.features.out_dtype)
    assert key.kernel.endswith("_dlse") == (dlse is not None)
    assert ("_ordered" in key.kernel) == (turns is not None)
    check_rows(key, out, dout, dtype=out_dtype(key))
    tile_m = key.tile.tile_m
    assert sums.shape[2] * tile_m == lse_log2.shape[2] == d.shape[2] and sums.shape[0] == 1
    for item in packed_model.read(items):
        first = item.block * tile_m
        rows = slice(item.q_begin + first, item.q_begin + min(first + tile_m, item.q_len))
        begin = _blocks(key, item).start + first
        num = rows.stop - rows.start
        block = begin // tile_m
        has_keys = lse[:, rows] > -torch.inf
        lse_log2[0, :, begin : begin + tile_m] = torch.inf
        lse_log2[0, :, begin : begin + num] = torch.where(has_keys, lse[:, rows] * LOG2_E, torch.inf)
        d[0, :, begin : begin + tile_m] = 0
        dots = (out[rows].float() * dout[rows].float()).sum(-1).T
        d[0, :, begin : begin + num] = dots - (0 if dlse is None else dlse[:, rows] * has_keys)
        sums[0, :, block] = 0
        if turns is not None:
            turns[0, :, block] = 0


def _main(key, q, k, v, dout, lse_log2, d, sums, *rest) -> None:
    *rest, items = rest
    rest, terms = rest[:-6], Terms(*rest[-6:])
    tile_n, batch = key.tile.tile_n, 0 if terms.slopes is None else len(terms.slopes)
    terms.check(key, work.num_padded_blocks(len(k), tile_n, batch))
    turns, dk, dv, scale, left, right, section, *grid = rest
    assert (turns is not None) == ("ordered" in key.kernel)
    if key.kernel.startswith("bwd_sm90"):
        num_blocks, counter = grid
        assert num_blocks >= 1 and counter == (0 if "ordered" in key.kernel else COUNTER)
    else:
        assert grid == []
    assert section >= 1 and k.shape[1] % section == 0 and 0 < scale < math.inf
    check_rows(key, q, k, v, dout, dk, dv)
    check_items(items)
    static = key.static
    band = Band(left if static.has_left else None, right if static.has_right else None)
    group, rows_of_sums = q.shape[1] // k.shape[1], sums.view(*sums.shape[:2], -1, key.tile.head_dim)
    for item in packed_model.read(items):
        first = item.block * tile_n
        keys = slice(item.k_begin + first, item.k_begin + min(first + tile_n, item.k_len))
        queries = slice(item.q_begin, item.q_begin + item.q_len)
        padded = slice(_blocks(key, item).start, _blocks(key, item).start + item.q_len)
        Q, dO = (x[queries].float().transpose(0, 1) for x in (q, dout))
        K, V = (x[keys].float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        span = range(first, first + keys.stop - keys.start)
        seen = loops.visible(band, range(item.q_len), span, item.q_len, item.k_len, Q.device)
        S, slope_of_cap = terms.capped(Q @ K.mT * scale)
        rows = torch.arange(item.q_len)[:, None]
        distance = (rows + item.k_len - item.q_len - torch.arange(span.start, span.stop)).abs()
        if terms.slopes is not None:
            S = S - terms.slopes[item.sequence, :, None, None] * distance
        P = (S * LOG2_E - lse_log2[0, :, padded, None]).exp2().masked_fill(~seen, 0)
        one = range(item.sequence, item.sequence + 1)
        Z = terms.factors(one, len(Q), range(item.q_len), span)
        Z = Z if isinstance(Z, float) else Z[0]
        dS = P * (Z * (dO @ V.mT) - d[0, :, padded, None])
        if terms.dslopes is not None and item.q_len:
            # All of it in one of the tile's parts.
            warps, block = slope_warps(key), work.padded_block(item.k_begin, item.sequence, tile_n)
            part = (block + item.block) * warps + item.block % warps
            assert not terms.dslopes[0, :, part].any(), "two tiles in one place"
            terms.dslopes[0, :, part] = -(dS * distance).sum(dim=(1, 2))
        dS = dS * slope_of_cap
        dv[keys] = ((P * Z).mT @ dO).unflatten(0, (-1, group)).sum(1).transpose(0, 1).to(dv.dtype)
        dk[keys] = (dS.mT @ Q * scale).unflatten(0, (-1, group)).sum(1).transpose(0, 1).to(dk.dtype)
        if item.q_len:
            rows_of_sums[0, :, padded, : q.shape[2]] += dS @ K


def _after(key, sums, dq, scale, items) -> None:
    check_rows(key, dq)
    by_rows = sums.view(*sums.shape[:2], -1, key.tile.head_dim)
    for item in packed_model.read(items):
        first, tile_m = item.block * key.tile.tile_m, key.tile.tile_m
        rows = slice(item.q_begin + first, item.q_begin + min(first + tile_m, item.q_len))
        begin = _blocks(key, item).start + first
        found = by_rows[0, :, begin : begin + rows.stop - rows.start, : dq.shape[2]] * scale
        dq[rows] = found.transpose(0, 1).to(dq.dtype)
