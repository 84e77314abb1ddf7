"""Base classes of the kernels: operands by name, symbols and launches."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from cute_flash.device.scheduling.seqlen import SeqlenInfo, with_batch_mode
from cute_flash.device.scheduling.tile_scheduler import read_tile
from cute_flash.device.scores.band import Band
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.planning.registry import KERNELS
from cute_flash.planning.varlen import TILE_LIST_HEADER
from cute_flash.spec.problem import Static

# Operands that are (T, H, D) or (H, T) in a varlen batch.
_WITH_ROWS = {
    operand.name
    for kernel in KERNELS.values()
    for operand in kernel.operands
    if operand.type.startswith(("rows", "statistics"))
}


def starts_last_tiles(static: Static) -> bool:
    """Whether the grid of a backward kernel starts with the last K/V tiles.

    With a left bound they are the longest. With a semaphore, a tile that others wait for must have started.
    """
    return static.has_left or static.deterministic


class Grid(NamedTuple):
    """The numbers of CTAs of a launch."""

    x: Int32
    y: Int32 | int = 1
    z: Int32 | int = 1


class Kernel:
    """A kernel of `planning.registry.KERNELS`.

    `__call__` is the host side. It takes the stream and, as keywords, the operands that the kernel's row of KERNELS
    lists. The method `kernel` is the device code.
    """

    def __init__(self, static: Static, tile: Any):
        self.static, self.tile = static, tile
        self.dtype = CUTE_DTYPES[static.mma_dtype]  # of the MMA operands

    def read_operands(self, operands: dict) -> SimpleNamespace:
        """The operands as attributes. Varlen tensors get a batch mode: (1, H, T, D) and (1, H, T).

        The fp16 pieces of an fp32 tensor x are `x_pieces`, and also `x`, unless the kernel has an operand x.
        """
        pieces = {name.removesuffix("_pieces"): mX for name, mX in operands.items() if name.endswith("_pieces")}
        if self.static.varlen:
            with_rows = {name: mX for name, mX in operands.items() if name in _WITH_ROWS and mX is not None}
            operands = operands | {name: with_batch_mode(mX) for name, mX in with_rows.items()}
        return SimpleNamespace(**(pieces | operands))

    def band(self, args: SimpleNamespace) -> Band:
        """The band of keys that a query sees, from the operands of the window and the chunk."""
        static = self.static
        return Band(
            args.window_left if static.has_left else None,
            args.window_right if static.has_right else None,
            args.attention_chunk if static.has_chunk else None,
        )

    @property
    def mask_name(self) -> str:
        """The mask in a symbol: "l", "r" or "lr" for the bounded sides, "lrc" with a chunk, or "full"."""
        sides = {"l": self.static.has_left, "r": self.static.has_right, "c": self.static.has_chunk}
        return "".join(side for side, is_bounded in sides.items() if is_bounded) or "full"

    @property
    def size_name(self) -> str:
        """The tile in a symbol."""
        return f"{self.tile.tile_m}x{self.tile.tile_n}"

    def symbol(self, kernel: str) -> str:
        """The symbol of an attention kernel, which names its head dims, dtype, mask, tile and features."""
        static, layout = self.static, getattr(self.tile, "layout", "swizzled")
        tags = "".join(f"_{tag}" for tag in (*static.tags, *(() if layout == "swizzled" else (layout,))))
        return f"cute_flash_{kernel}_d{static.widths}_{static.dtype}_{self.mask_name}_{self.size_name}{tags}"

    def launch(self, symbol: str, params: Any, grid: Grid, num_threads: int, stream: CUstream, **options: Any):
        """Launch `kernel` under the name `symbol`.

        The name must not contain "cutlass", because ptxas compiles kernels with that word in their name differently.
        """
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(params).launch(grid=grid, block=(num_threads, 1, 1), stream=stream, **options)


class MBlockKernel(Kernel):
    """A kernel with one CTA per m_block and head: the preprocess and postprocess kernels of the backward."""

    name: str
    rows: str  # name of an operand (B, H, Sq, ...), whose shape gives the number of queries
    num_threads: int
    overlaps_previous = False  # it starts before the previous kernel ends, and waits (programmatic dependent launch)

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        args = self.read_operands(operands)
        batch, heads, num_blocks, _ = args.dq_accum.shape
        if cutlass.const_expr(self.static.varlen):
            num_blocks = args.q_tile_list.shape[0] - TILE_LIST_HEADER
        params, grid = self.params(args), Grid(num_blocks, heads, batch)
        symbol = f"cute_flash_{self.name}_{self.static.dtype}"
        self.launch(symbol, params, grid, self.num_threads, stream, use_pdl=self.overlaps_previous)

    @cute.jit
    def process_cta(self, p: Any, index: Int32, head: Int32, batch: Int32):
        """Call `process_block` for the m_block of this CTA, if there is one: a varlen grid may exceed the tile list."""
        if cutlass.const_expr(self.static.varlen):
            if index < p.q_tile_list[0, 0]:
                m_block, seqlen_values = read_tile(p.q_tile_list, index)
                self.process_block(p, m_block, head, SeqlenInfo.of_values(seqlen_values))
        else:
            seqlen = SeqlenInfo(batch, getattr(p, self.rows).shape[2], Int32(0))
            self.process_block(p, index, head, seqlen)
