"""The fake arguments with which a kernel is compiled: one for each of its operands in `planning.registry`.

All sizes and strides are dynamic, except the head dims. An operand that the kernel does not take is None. In a varlen
batch, rows are (T, H, D) instead of (B, H, S, D), statistics are (H, T), and the workspace has a batch of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_flash.planning.launch import LaunchKey
from cute_flash.planning.varlen import TILE_LIST_WIDTH
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.features import Operand

# DSL types of torch dtypes. Captured bools are read as bytes; captured doubles are converted to fp32 before the launch.
CUTE_DTYPES = {
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float32": Float32,
    "float64": Float32,
    "int8": cutlass.Int8,
    "uint8": cutlass.Uint8,
    "int16": cutlass.Int16,
    "int32": Int32,
    "int64": Int64,
    "bool": cutlass.Uint8,
}
SCALARS = {"f32": Float32, "i32": Int32, "i64": Int64}
ELEMENTS = {"f32": "float32", "i32": "int32", "i64": "int64"}
# Names of dimensions that have the symbolic size of "B": `_BATCH` always, `_DENSE_BATCH` only in a dense batch. In a
# varlen batch "B" is the batch of the workspace, which is 1, and "sequences" is the number of sequences.
_BATCH, _DENSE_BATCH = ("dalibi batch",), ("sequences",)


def fake_arguments(key: LaunchKey) -> dict[str, Any]:
    """The fakes of a launch by name: torch's current stream, then `key.parameters` in order."""
    arguments: dict[str, Any] = {x.name: None for x in key.parameters}
    sizes: dict[str, Any] = {}
    for one in key.keys:
        fakes = Fakes(one.static, one.tile, sizes)
        missing = [x for x in one.parameters if one.takes(x) and arguments[x.name] is None]
        arguments |= {x.name: fakes.make(x) for x in missing}
    return {"stream": make_fake_stream(use_tvm_ffi_env_stream=True), **arguments}


class Fakes:
    """Makes the fakes of one kernel. Dimensions of the same name share one symbolic size, also in a chain."""

    def __init__(self, static: Any, tile: Any, sizes: dict[str, Any]) -> None:
        """`sizes` has the symbolic sizes of kernels before this one; those of this kernel are added."""
        self.static, self.tile, self.sizes = static, tile, sizes
        self.widths = {"D": static.head_dim, "Dv": static.width_v}
        self.widths["cache D"] = getattr(static, "cache_width", static.head_dim)

    def make(self, operand: Operand) -> Any:
        """The fake of one operand, by its `Operand.type`."""
        layout, _, element = operand.type.partition(" ")
        if layout in SCALARS:
            return SCALARS[layout](1)
        if not element:
            return getattr(self, layout)(operand)
        dtype = ELEMENTS.get(element) or self.static.element_dtype(element)
        return getattr(self, layout)(dtype, operand.dims)

    def size(self, name: str) -> Any:
        if name.isdigit():
            return int(name)
        if name in self.widths:
            return self.widths[name]
        if name in _BATCH or (name in _DENSE_BATCH and not self.static.varlen):
            name = "B"
        if name not in self.sizes:
            self.sizes[name] = cute.sym_int()
        return self.sizes[name]

    def shape(self, dims: tuple[str, ...]) -> tuple:
        return tuple(self.size(name) for name in dims)

    # ---- layouts, the first word of `Operand.type`

    def rows(self, dtype: str, dims: tuple[str, ...]) -> cute.Tensor:
        """(B, H, S, D), or (T, H, D) in a varlen batch, with rows that begin at multiples of 16 bytes."""
        if self.static.varlen:
            _batch, heads, seqlen, width = dims
            dims = seqlen, heads, width
        return _rows(CUTE_DTYPES[dtype], self.shape(dims))

    def statistics(self, dtype: str, dims: tuple[str, ...]) -> cute.Tensor:
        """(B, H, S), or (H, T) in a varlen batch, contiguous."""
        return _compact(CUTE_DTYPES[dtype], self.shape(dims[1:] if self.static.varlen else dims))

    def compact(self, dtype: str, dims: tuple[str, ...]) -> cute.Tensor:
        # Kernels copy a padded workspace in 16-byte vectors.
        align = ROW_ALIGN_BYTES if any(name.startswith("padded") for name in dims) else None
        return _compact(CUTE_DTYPES[dtype], self.shape(dims), align)

    def strided(self, dtype: str, dims: tuple[str, ...]) -> cute.Tensor:
        return _strided(CUTE_DTYPES[dtype], self.shape(dims))

    # ---- operands with a method of their own

    def tile_list(self, operand: Operand) -> cute.Tensor:
        """The tile list of a varlen batch (`planning.varlen`)."""
        return _compact(Int32, (cute.sym_int(), TILE_LIST_WIDTH), ROW_ALIGN_BYTES)

    def dq_accum(self, operand: Operand) -> cute.Tensor:
        """fp32 accumulators of dQ, a tile per m_block, in register order."""
        elements = self.tile.tile_m * self.tile.head_dim
        return _compact(Float32, (*self.shape(operand.dims), elements), ROW_ALIGN_BYTES)

    def rotary(self, operand: Operand) -> cute.Tensor:
        """Cosines or sines, a row for each position."""
        return _compact(CUTE_DTYPES[self.static.rotary_dtype], self.shape(operand.dims))

    def partial_out(self, operand: Operand) -> cute.Tensor:
        """Outputs of the splits of a decode call, in fp32."""
        return _compact(Float32, (*self.shape(operand.dims), self.tile.tile_m, self.tile.width_v), ROW_ALIGN_BYTES)

    def partial_stats(self, operand: Operand) -> cute.Tensor:
        """The maximum and the sum of each row of a split."""
        return _compact(Float32, (*self.shape(operand.dims), self.tile.tile_m, 2), 8)

    def partials(self, operand: Operand) -> list[cute.Tensor]:
        """Partial outputs of a merge, in fp32, each with some rows of the output."""
        heads, width = self.shape(operand.dims), self.size("Dv")
        return [_rows(Float32, (*heads, cute.sym_int(), width)) for _ in range(self.static.num_partials)]

    def partial_lses(self, operand: Operand) -> list[cute.Tensor]:
        """The LSEs of the partial outputs."""
        heads = self.shape(operand.dims)
        return [_compact(Float32, (*heads, cute.sym_int())) for _ in range(self.static.num_partials)]

    def first_rows(self, operand: Operand) -> list[Int32]:
        """The rows of the output at which the partial outputs begin."""
        return [Int32(1) for _ in range(self.static.num_partials)]

    def pieces(self, operand: Operand) -> cute.Tensor:
        """The fp16 pieces of fp32 rows: in each row the high pieces, then the low ones."""
        return _rows(cutlass.Float16, (*self.shape(operand.dims), 2 * self.tile.head_dim))

    def bias(self, operand: Operand) -> cute.Tensor:
        """(B, H, Sq, Sk). Rows start at multiples of 8 elements for TMA, or of 2 for paired loads."""
        mods, shape = self.static.mods, self.shape(operand.dims)
        dtype = CUTE_DTYPES[mods.bias_dtype]
        if not (mods.bias_tma or mods.bias_paired_loads):
            return _strided(dtype, shape)
        return _rows(dtype, shape, (8 if mods.bias_tma else 2) * dtype.width // 8)

    def dbias(self, operand: Operand) -> cute.Tensor:
        """The gradient of the bias; its rows start at multiples of 16 bytes if TMA stores it."""
        dtype, shape = CUTE_DTYPES[self.static.mods.dbias_dtype], self.shape(operand.dims)
        return _rows(dtype, shape) if self.static.mods.dbias_tma else _strided(dtype, shape, last=1)

    def captures(self, operand: Operand) -> list[cute.Tensor]:
        """The tensors that user mods capture, graph by graph."""
        return [_capture(x) for graph in self.static.mods.graphs.present for x in graph.captures]

    def scalars(self, operand: Operand) -> list:
        return [Float32(1.0) if kind == "float" else Int32(1) for kind in self.static.mods.scalar_kinds]

    def dcaptures(self, operand: Operand) -> list[cute.Tensor]:
        """fp32 gradients of the tensors that score_mod captures and that need one."""
        mods = self.static.mods
        ranks = [max(1, mods.graphs.score.captures[i].rank) for i in mods.captures_needing_grad]
        shapes = [tuple(cute.sym_int() for _ in range(rank)) for rank in ranks]
        return [_compact(Float32, shape, use_32bit_stride=True) for shape in shapes]

    def dcapture_terms(self, operand: Operand) -> list[cute.Tensor]:
        """For deterministic gradients of captures: the term of each score, and the element that it is added to."""
        return [_compact(dtype, self.shape(operand.dims)) for dtype in (Float32, Int32)]

    def fwd_block_indices(self, operand: Operand) -> list[cute.Tensor]:
        """The fields of `device.scheduling.block_sparse.BlockIndices`."""
        heads, q_blocks, kv_blocks = self.shape(("B", "H")), cute.sym_int(), cute.sym_int()
        return [_strided(Int32, (*heads, q_blocks, *x), last=1) for _ in range(2) for x in ((), (kv_blocks,))]

    def bwd_block_indices(self, operand: Operand) -> list[cute.Tensor]:
        """The fields of `BwdBlockIndices` of `device/scheduling`; the ranks only with deterministic gradients."""
        heads, tiles = self.shape(("B", "Hkv")), cute.sym_int()
        lists = [_strided(Int32, (*heads, tiles)), _strided(Int32, (*heads, tiles, cute.sym_int()))]
        if self.static.deterministic:
            lists.append(_strided(Int32, (*self.shape(("B", "H")), cute.sym_int(), tiles)))
        return lists


def _rows(dtype: Any, shape: Sequence[Any], align: int = ROW_ALIGN_BYTES) -> cute.Tensor:
    """A tensor with rows that begin at multiples of `align` bytes."""
    strides = (*(cute.sym_int64(divisibility=align * 8 // dtype.width) for _ in shape[1:]), 1)
    return make_fake_tensor(dtype, shape, strides, assumed_align=align)


def _compact(dtype: Any, shape: Sequence[Any], align: int | None = None, **options: Any) -> cute.Tensor:
    order, align = tuple(reversed(range(len(shape)))), align or dtype.width // 8
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align, **options)


def _strided(dtype: Any, shape: Sequence[Any], last: int | None = None) -> cute.Tensor:
    """A tensor of any strides. `last`: the stride of the last dimension; None: unknown."""
    *strides, end = (cute.sym_int64() for _ in shape)
    strides = (*strides, end if last is None else last)
    return make_fake_tensor(dtype, shape, strides, assumed_align=dtype.width // 8)


def _capture(capture: Any) -> cute.Tensor:
    dtype, rank = CUTE_DTYPES[capture.dtype], max(1, capture.rank)
    return _strided(dtype, tuple(cute.sym_int() for _ in range(rank)))
