"""Checks of a launch's arguments against the types that the kernel is compiled for.

They follow the types of `planning.registry` as `kernels/common/fakes.py` does, on real tensors and without cutlass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cute_flash.planning.plan import MAX_SEQLEN, CompileKey
from cute_flash.planning.registry import KERNELS
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.varlen import TILE_LIST_WIDTH
from cute_flash.score_mod.graph import COLUMN, ROW
from cute_flash.spec.dropout import threshold
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.features import Operand
from cute_flash.spec.problem import Static
from tests.fakes.recording import COUNTER

ELEMENTS = {"f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
RANGES = {"i32": 1 << 31, "i64": 1 << 63}
# Rows of the largest tile: offsets within it have 32 bits.
MAX_TILE_ROWS = 512


def check(key: CompileKey, arguments: dict[str, Any]) -> None:
    """Assert that a compiled kernel would accept these arguments, and that they are consistent."""
    checker = Checker(key)
    for operand in KERNELS[key.kernel].operands:
        value = arguments[operand.name]
        if key.takes(operand):
            assert value is not None, f"{key.kernel}: {operand.name} is missing"
            checker.check(operand, value)
        else:
            assert value is None, f"{key.kernel}: {operand.name} is not compiled in"
    _check_values(key, arguments)


def graphs_of(static: Static) -> list:
    """The graphs of user mods whose captures and scalars a kernel takes, in order."""
    graphs = static.mods.graphs
    return [graph for graph in (graphs.score, graphs.mask, graphs.bwd) if graph is not None]


def out_dtype(static: Static) -> str:
    return "float32" if getattr(static, "out_fp32", False) else static.dtype


class Checker:
    """One method per layout or kind of operand. Dimensions with the same name must have the same size."""

    def __init__(self, key: CompileKey) -> None:
        self.key, self.static = key, key.static
        self.sizes: dict[str, int] = {"D": self.static.head_dim, "Dv": self.static.width_v}

    def check(self, operand: Operand, value: Any) -> None:
        layout, _, element = operand.type.partition(" ")
        if layout in ("f32", "i32", "i64"):
            assert isinstance(value, (float, int) if layout == "f32" else int), operand.name
            assert abs(value) < RANGES.get(layout, math.inf), operand.name
        elif element:
            own = {"dtype": self.static.dtype, "out": out_dtype(self.static)}
            if element == "cache":
                own["cache"] = self.static.element_dtype("cache")
            dtype = getattr(torch, own[element]) if element in own else ELEMENTS[element]
            assert value.dtype == dtype, f"{operand.name} is {value.dtype}, compiled for {dtype}"
            getattr(self, layout)(operand, value)
        else:
            getattr(self, layout)(operand, value)

    def shape(self, operand: Operand, value: Tensor, dims: tuple[str, ...]) -> None:
        assert value.dim() == len(dims), f"{operand.name} has shape {tuple(value.shape)}: expected {dims}"
        for name, size in zip(dims, value.shape, strict=True):
            if name == "dalibi batch" or (name == "sequences" and not self.static.varlen):
                name = "B"
            expected = int(name) if name.isdigit() else self.sizes.setdefault(name, size)
            assert size == expected, f"{operand.name} has shape {tuple(value.shape)}: {name} is {expected}"

    # ---- layouts

    def rows(self, operand: Operand, value: Tensor) -> None:
        """(B, H, S, D), or (T, H, D), with rows that start at multiples of 16 bytes."""
        dims = operand.dims
        self.shape(operand, value, (dims[2], dims[1], dims[3]) if self.static.varlen else dims)
        *outer, element = value.stride()
        row = outer[0] if self.static.varlen else outer[-1]
        step = ROW_ALIGN_BYTES // value.element_size()
        assert element == 1 and not any(x % step for x in outer), f"{operand.name}: strides {value.stride()}"
        assert 0 <= row * MAX_TILE_ROWS < 1 << 31, operand.name
        assert value.data_ptr() % ROW_ALIGN_BYTES == 0 and not value.is_neg(), operand.name

    def statistics(self, operand: Operand, value: Tensor) -> None:
        """(B, H, S), or (H, T)."""
        self.shape(operand, value, operand.dims[1:] if self.static.varlen else operand.dims)
        assert value.is_contiguous(), operand.name

    def compact(self, operand: Operand, value: Tensor) -> None:
        self.shape(operand, value, operand.dims)
        is_padded = any(name.startswith("padded") for name in operand.dims)
        align = ROW_ALIGN_BYTES if is_padded else value.element_size()
        assert value.is_contiguous() and value.data_ptr() % align == 0, operand.name

    def strided(self, operand: Operand, value: Tensor) -> None:
        self.shape(operand, value, operand.dims)

    # ---- named kinds

    def rotary(self, operand: Operand, value: Tensor) -> None:
        assert value.dtype == getattr(torch, self.static.rotary_dtype) and value.is_contiguous()
        self.shape(operand, value, operand.dims)

    def partial_out(self, operand: Operand, value: Tensor) -> None:
        assert value.dtype == torch.float32 and value.is_contiguous()
        self.shape(operand, value[:, 0, 0] if value.dim() > 2 else value[:, 0], operand.dims)

    partial_stats = partial_out

    def pieces(self, operand: Operand, value: Tensor) -> None:
        assert value.dtype == torch.float16 and value.is_contiguous() and value.data_ptr() % ROW_ALIGN_BYTES == 0
        self.shape(operand, value, (*operand.dims, str(2 * self.key.tile.head_dim)))

    def tile_list(self, operand: Operand, value: Tensor) -> None:
        assert value.dtype == torch.int32 and value.is_contiguous() and value.data_ptr() % ROW_ALIGN_BYTES == 0
        assert value.dim() == 2 and value.shape[1] == TILE_LIST_WIDTH

    def dq_accum(self, operand: Operand, value: Tensor) -> None:
        tile: Any = self.key.tile
        assert value.dtype == torch.float32 and value.is_contiguous() and value.data_ptr() % ROW_ALIGN_BYTES == 0
        self.shape(operand, value, (*operand.dims, str(tile.tile_m * tile.head_dim)))

    def partials(self, operand: Operand, value: list[Tensor]) -> None:
        assert len(value) == self.static.num_partials
        for x in value:
            self.shape(operand, x[:, :, 0], (*operand.dims, "Dv"))
            *outer, element = x.stride()
            assert x.dtype == torch.float32 and element == 1 and not any(stride % 4 for stride in outer)
            assert x.data_ptr() % ROW_ALIGN_BYTES == 0

    def partial_lses(self, operand: Operand, value: list[Tensor]) -> None:
        assert len(value) == self.static.num_partials
        for x in value:
            self.shape(operand, x[:, :, 0], operand.dims)
            assert x.dtype == torch.float32 and x.is_contiguous()

    def first_rows(self, operand: Operand, value: list[int]) -> None:
        assert len(value) == self.static.num_partials
        assert all(isinstance(x, int) and 0 <= x < self.sizes["S"] for x in value)

    def bias(self, operand: Operand, value: Tensor) -> None:
        mods = self.static.mods
        self.shape(operand, value, operand.dims)
        assert str(value.dtype) == f"torch.{mods.bias_dtype}"
        *outer, element = value.stride()
        step = 8 if mods.bias_tma else 2 if mods.bias_paired_loads else 1
        assert not any(x % step for x in outer) and (element == 1 or step == 1)
        assert value.data_ptr() % (step * value.element_size()) == 0
        if self.key.kernel.startswith("bwd"):
            by_row, by_column = (x != 0 and n > 1 for n, x in zip(value.shape[2:], value.stride()[2:]))
            assert by_row <= bool(mods.bias_varies & ROW) and by_column <= bool(mods.bias_varies & COLUMN)
        else:
            assert (outer[2] != 0) == mods.bias_varies_by_row

    def dbias(self, operand: Operand, value: Tensor) -> None:
        """(B, H, Sq, Sk); sums have strides of 0, or sizes of 1, where the bias broadcasts."""
        mods = self.static.mods
        self.shape(operand, value, operand.dims)
        assert str(value.dtype) == f"torch.{mods.dbias_dtype}" and value.stride(3) == 1
        if mods.dbias_tma:
            assert not any(x % 8 for x in value.stride()[:3]) and value.data_ptr() % 16 == 0
            assert value.dtype == getattr(torch, self.static.dtype)
        full = (self.sizes["B"], self.sizes["H"], self.sizes["Sq"], self.sizes["Sk"])
        is_shared = tuple(value.shape) != full or 0 in value.stride()
        assert is_shared <= mods.dbias_accumulates
        varies = mods.bias_varies & ROW, mods.bias_varies & COLUMN
        for size, expected, differs in zip(value.shape[2:], full[2:], varies, strict=True):
            assert size == (expected if differs or not mods.dbias_accumulates else 1)
        if mods.dbias_accumulates:
            assert not value.any(), "sums begin with 0"

    def captures(self, operand: Operand, value: list[Tensor]) -> None:
        expected = [table for graph in graphs_of(self.static) for table in graph.captures]
        names = {"bool": "uint8", "float64": "float32"}
        for table, x in zip(expected, value, strict=True):
            assert str(x.dtype) == f"torch.{names.get(table.dtype, table.dtype)}"
            assert x.dim() == max(1, table.rank) and not x.is_neg()

    def scalars(self, operand: Operand, value: list[int | float]) -> None:
        kinds = [kind for graph in graphs_of(self.static) for kind in graph.scalars]
        assert [type(x).__name__ for x in value] == kinds

    def dcaptures(self, operand: Operand, value: list[Tensor]) -> None:
        mods = self.static.mods
        for i, x in zip(mods.captures_needing_grad, value, strict=True):
            assert x.dtype == torch.float32 and x.is_contiguous() and not x.any()
            assert x.dim() == max(1, mods.graphs.score.captures[i].rank)

    def dcapture_terms(self, operand: Operand, value: list[Tensor]) -> None:
        for x, dtype in zip(value, (torch.float32, torch.int32), strict=True):
            self.shape(operand, x, operand.dims)
            assert x.dtype == dtype and x.is_contiguous() and not x.any()

    def fwd_block_indices(self, operand: Operand, value: list[Tensor]) -> None:
        """Counts and indices of full blocks, then of partial ones."""
        tile = self.static.mods.block_mask_tile
        blocks = [-(-self.sizes[name] // size) for name, size in zip(("Sq", "Sk"), tile, strict=True)]
        for x, own in zip(value, ((blocks[0],), tuple(blocks)) * 2, strict=True):
            assert x.shape == (self.sizes["B"], self.sizes["H"], *own)
            assert x.dtype == torch.int32 and x.stride(-1) == 1

    def bwd_block_indices(self, operand: Operand, value: list[Tensor]) -> None:
        """Counts and indices of the m_blocks of each K/V tile."""
        num, indices, *ranks = value
        assert len(ranks) == self.static.deterministic
        tiles = -(-self.sizes["Sk"] // self.key.tile.tile_n)  # type: ignore[union-attr]
        assert num.shape == (self.sizes["B"], self.sizes["Hkv"], tiles) == indices.shape[:3]
        assert all(x.dtype == torch.int32 for x in value)
        blocks = -(-self.sizes["Sq"] // self.key.tile.tile_m)  # type: ignore[union-attr]
        assert all(x.shape == (self.sizes["B"], self.sizes["H"], blocks, tiles) for x in ranks)


def _check_values(key: CompileKey, a: dict[str, Any]) -> None:
    """Check ranges, initial values and agreement between operands, which types do not cover."""
    static = key.static
    if "scale" in a:
        assert 0 < a["scale"] < math.inf
        assert all(0 <= (a[f"window_{side}"] or 0) <= MAX_SEQLEN for side in ("left", "right"))
    if a.get("attention_chunk") is not None:
        assert 0 < a["attention_chunk"] <= MAX_SEQLEN
    if "heads_per_l2_group" in a:
        name = ("q" if key.kernel.startswith("fwd") else "k") + "_pieces" * static.is_fp32
        heads = a[name].shape[1]
        heads *= 1 if static.varlen else a[name].shape[0]
        assert a["heads_per_l2_group"] >= 1 and heads % a["heads_per_l2_group"] == 0
    if "num_ctas" in a:
        assert a["num_ctas"] >= 1
    if "tile_counter" in a:
        assert a["tile_counter"] == (COUNTER if is_dynamic(key) else 0)
    if a.get("softcap") is not None:
        assert a["softcap"] > 0 and math.isfinite(torch.tensor(a["scale"] / a["softcap"]).float() * 2.9)
    if a.get("dropout_scale") is not None:
        expected = threshold(1 - 1 / a["dropout_scale"]) * 0x10001
        assert a["dropout_threshold"] == expected, "the threshold is in both halves"
    if a.get("max_logit") is not None:
        assert (a["max_logit"] == -torch.inf).all()
    if a.get("dalibi_partial") is not None:
        assert not a["dalibi_partial"].any()
        assert a["dalibi_partial"].shape[2] % dalibi_warps(key) == 0


def is_dynamic(key: CompileKey) -> bool:
    """Whether CTAs fetch their tiles from a counter: if tiles differ in length, and no tile waits for another."""
    static = key.static
    differs = static.is_bounded or static.varlen or static.block_sparse
    return differs and key.kernel in ("fwd_sm90", "bwd_sm90") and not static.deterministic


def dalibi_warps(key: CompileKey) -> int:
    """The number of warps of a backward CTA; each stores a part of dalibi."""
    return key.tile.num_warps if isinstance(key.tile, BwdTileSm80) else 8
