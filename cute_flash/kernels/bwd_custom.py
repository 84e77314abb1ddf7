"""The backward kernels with a bias, functions that users write, and block maps: the general ones, with more
arguments.
"""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cute_flash.device.bias_bwd import BiasTerms
from cute_flash.device.entry_list import EntryLists
from cute_flash.device.mods_bwd import Code, WrittenTerms
from cute_flash.device.score import Score
from cute_flash.device.score_bwd import Terms
from cute_flash.kernels.bwd_general import with_terms
from cute_flash.kernels.bwd_sm80 import BwdSm80
from cute_flash.kernels.bwd_sm90 import BwdSm90
from cute_flash.kernels.extras import TABLE_TYPES, fake_written
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90
from cute_flash.spec.problem import Static


def with_written(arguments: tuple, kernel: BwdSm80 | BwdSm90) -> tuple:
    """The fake arguments of a general kernel, with more before the list of tiles: bias, tables, numbers,
    the gradients of bias and tables, and the lists of a block map.
    """
    *general, items, stream = with_terms(arguments, kernel)
    static, mQ, mK = kernel.static, general[0], general[1]
    bias, tables, numbers, _lists = fake_written(mQ, mK, static, uses_bwd=True)
    lists = _fake_lists(mQ, mK) if static.features.block_map else None
    gradients = _fake_dbias(mQ, static), _fake_dtables(static) or None
    return (*general, bias, tables, numbers, *gradients, lists, items, stream)


def _strided(of, *shape) -> cute.Tensor:
    strides = tuple(cute.sym_int64() for _ in shape)
    return make_fake_tensor(of, shape, strides, assumed_align=of.width // 8)


def _fake_dbias(mQ: cute.Tensor, static: Static) -> cute.Tensor | None:
    if not static.mods.dbias:
        return None
    of, heads = TABLE_TYPES[static.mods.dbias], mQ.shape[:2]
    strides = (*(cute.sym_int64() for _ in range(3)), 1)
    return make_fake_tensor(
        of, (*heads, cute.sym_int(), cute.sym_int()), strides, assumed_align=of.width // 8
    )


def _fake_dtables(static: Static) -> list[cute.Tensor]:
    """fp32, compact."""
    found = []
    for i in static.mods.wanted:
        rank = max(1, static.mods.graphs.score.tables[i].rank)
        shape, order = tuple(cute.sym_int() for _ in range(rank)), tuple(reversed(range(rank)))
        one = make_fake_compact_tensor(
            Float32, shape, stride_order=order, use_32bit_stride=True, assumed_align=4
        )
        found.append(one)
    return found


def _fake_lists(mQ: cute.Tensor, mK: cute.Tensor) -> list[cute.Tensor]:
    heads, tiles = (mQ.shape[0], mK.shape[1]), cute.sym_int()
    return [_strided(Int32, *heads, tiles), _strided(Int32, *heads, tiles, cute.sym_int())]


class WithWritten:
    """Of a kernel that has it."""

    static: Static
    tile: BwdTileSm80 | BwdTileSm90

    def terms(self, mQ: cute.Tensor, scale: Float32, general: tuple, given: tuple) -> Terms:
        """`general`: softcap, slopes and what follows it; `given`: what `with_written` adds."""
        softcap, *others = general
        bias, tables, numbers, dbias, dtables, lists = given
        mods = self.static.mods
        arguments = (() if x is None else tuple(x) for x in (tables, numbers))
        parts = mods.graphs.parts(*arguments)
        written = WrittenTerms(
            Code.of(mods.graphs, mods.wanted),
            scale,
            softcap,
            *(_or_none(part) for part in (parts.score, parts.mask, parts.gradient)),
            None if bias is None else BiasTerms(bias, dbias, mods.bias_bits, mods.adds_bias),
            None if dtables is None else tuple(dtables),
            None if lists is None else EntryLists(*lists),
            self.tile.prefetches_bias(mods.gradient_inner),
        )
        return Terms(Score.of(scale, softcap, gives_tangent=True), mQ.shape[1], *others, written)


def _or_none(part: tuple) -> tuple | None:
    """(tables, numbers), with None for what is empty: kernels take no empty tuples."""
    found = tuple(x or None for x in part)
    return None if found == (None, None) else found


class BwdSm80Custom(WithWritten, BwdSm80):
    def fake_arguments(self) -> tuple:
        return with_written(super().fake_arguments(), self)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mD: cute.Tensor,
        mdQ: cute.Tensor,
        mCounters: cute.Tensor | None,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        section: Int32,
        softcap: Float32 | None,
        slopes: cute.Tensor | None,
        dslopes: cute.Tensor | None,
        threshold: Int32 | None,
        keep_scale: Float32 | None,
        rng: cute.Tensor | None,
        bias: cute.Tensor | None,
        tables: list | None,
        numbers: list | None,
        dbias: cute.Tensor | None,
        dtables: list | None,
        lists: list | None,
        items: cute.Tensor | None,
        stream: CUstream,
    ):
        tensors, bounds = (mQ, mK, mV, mdO, mLSE, mD, mdQ, mCounters, mdK, mdV), (window_left, window_right)
        general = softcap, slopes, dslopes, threshold, keep_scale, rng
        terms = self.terms(mQ, scale, general, (bias, tables, numbers, dbias, dtables, lists))
        self.launch(tensors, scale, bounds, section, terms, items, stream)


class BwdSm90Custom(WithWritten, BwdSm90):
    def fake_arguments(self) -> tuple:
        return with_written(super().fake_arguments(), self)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mD: cute.Tensor,
        mdQ: cute.Tensor,
        mCounters: cute.Tensor | None,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        section: Int32,
        num_blocks: Int32,
        counter: Int64,
        softcap: Float32 | None,
        slopes: cute.Tensor | None,
        dslopes: cute.Tensor | None,
        threshold: Int32 | None,
        keep_scale: Float32 | None,
        rng: cute.Tensor | None,
        bias: cute.Tensor | None,
        tables: list | None,
        numbers: list | None,
        dbias: cute.Tensor | None,
        dtables: list | None,
        lists: list | None,
        items: cute.Tensor | None,
        stream: CUstream,
    ):
        tensors = mQ, mK, mV, mdO, mLSE, mD, mdQ, mCounters, mdK, mdV
        bounds, grid = (window_left, window_right), (section, num_blocks, counter)
        general = softcap, slopes, dslopes, threshold, keep_scale, rng
        terms = self.terms(mQ, scale, general, (bias, tables, numbers, dbias, dtables, lists))
        self.launch(tensors, scale, bounds, grid, terms, items, stream)


class BwdSm90OrderedCustom(BwdSm90Custom):
    """Tiles of keys add to a block of dQ in turn."""

    is_ordered = True
