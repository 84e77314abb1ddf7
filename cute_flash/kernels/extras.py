"""What the forward kernels may be asked for beyond plain attention: how it is passed, and what it is for a
head.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cute_flash.device.block_list import BlockLists
from cute_flash.device.philox import Dropout
from cute_flash.device.score import Score
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.written import Written, WrittenOfHead
from cute_flash.kernels.arguments import DTYPES
from cute_flash.spec.problem import Features, Static


@dataclass(frozen=True)
class Extras:
    """Of a launch. None: not asked for."""

    score: Score | None = None  # without the slopes
    slopes: cute.Tensor | None = None  # (B, H)
    sinks: cute.Tensor | None = None  # (H)
    rng: cute.Tensor | None = None  # (seed, offset)
    threshold: Int32 | None = None  # in both halves: draws below it are dropped
    keep_scale: Float32 | None = None  # 1 / (1 - dropout)
    max_logit: cute.Tensor | None = None  # (H), -inf before the launch
    written: Written | None = None
    lists: BlockLists | None = None  # of a block map

    @staticmethod
    def of(
        scale, softcap, slopes, sinks, threshold, keep_scale, rng, max_logit, written=None, lists=None
    ) -> "Extras":
        """The arguments of a launch, in their order."""
        # A bias and functions are of natural scores.
        is_natural = written is not None and written.changes_scores
        transforms = softcap is not None or slopes is not None or is_natural
        score = Score.of(scale, softcap, unit=1.0 if is_natural else LOG2_E) if transforms else None
        found = None if lists is None else BlockLists(*lists)
        return Extras(score, slopes, sinks, rng, threshold, keep_scale, max_logit, written, found)

    def dropout(self) -> Dropout | None:
        if self.rng is None:
            return None
        return Dropout.read(self.rng, Uint32(self.threshold), self.keep_scale)

    def shares_batch(self) -> cutlass.Boolean | None:
        """Whether the bias is the same for all of the batch; None without one."""
        return None if self.written is None or self.written.bias is None else self.written.bias.stride[0] == 0

    def of_head(self, head: Int32, batch: Int32) -> "OfHead":
        score = self.score
        if self.slopes is not None:
            score = score.of_head(self.slopes[batch, head])
        written = None if self.written is None else self.written.of_head(head, batch)
        return OfHead(score, None if self.sinks is None else self.sinks[head], self.keep_scale, written)


NO_EXTRAS = Extras()


@dataclass(frozen=True)
class OfHead:
    score: Score | None
    sink: Float32 | None
    keep_scale: Float32 | None
    written: WrittenOfHead | None = None


def softmax_scale(scale: Float32, extras: Extras) -> Float32:
    """Scores that were transformed are in units of log2 already, or natural."""
    if extras.score is None:
        return scale * LOG2_E
    return Float32(LOG2_E if extras.score.unit == 1.0 else 1.0)


def written_of(static: Static, bias, tables, numbers) -> Written:
    of_functions = (None if given is None else tuple(given) for given in (tables, numbers))
    return Written(static.mods, bias, *of_functions)


# As `custom_cuda` passes captured tensors.
TABLE_TYPES = {
    **DTYPES,
    "float32": Float32,
    "float64": Float32,
    "int32": Int32,
    "int64": Int64,
    "bool": cutlass.Uint8,
}


def fake_written(mQ: cute.Tensor, mK: cute.Tensor, static: Static, uses_bwd: bool = False) -> tuple:
    """What `custom_cuda.Given` names. `uses_bwd`: with the arguments of score_mod_bwd."""
    mods = static.mods
    graphs = [mods.graphs.score, mods.graphs.mask, *([mods.graphs.bwd] if uses_bwd else [])]
    tables = [_fake_table(table) for graph in graphs if graph is not None for table in graph.captures]
    kinds = [kind for graph in graphs if graph is not None for kind in graph.scalars]
    numbers = [Float32(1.0) if kind == "float" else Int32(1) for kind in kinds]
    return (
        _fake_bias(mQ, mK, static) if mods.bias_dtype else None,
        tables or None,
        numbers or None,
        None if mods.block_mask_tile is None else _fake_lists(mQ),
    )


def _fake_table(table) -> cute.Tensor:
    of, rank = TABLE_TYPES[table.dtype], max(1, table.rank)
    sizes, strides = ([make() for _ in range(rank)] for make in (cute.sym_int, cute.sym_int64))
    return make_fake_tensor(of, tuple(sizes), tuple(strides), assumed_align=of.width // 8)


def _fake_bias(mQ: cute.Tensor, mK: cute.Tensor, static: Static) -> cute.Tensor:
    """(B, H, Sq, Sk), never packed."""
    of, together = TABLE_TYPES[static.mods.bias_dtype], 2 if static.mods.bias_paired_loads else 1
    together = 8 if static.mods.bias_tma else together
    shape = mQ.shape[0], mQ.shape[1], mQ.shape[2], mK.shape[2]
    strides = [cute.sym_int64(divisibility=together) for _ in range(3)]
    last = 1 if static.mods.bias_paired_loads else cute.sym_int64()
    return make_fake_tensor(of, shape, (*strides, last), assumed_align=together * of.width // 8)


def _fake_lists(mQ: cute.Tensor) -> list[cute.Tensor]:
    """Of full blocks and then of partial ones: how many (B, H, blocks), and which (B, H, blocks, others)."""
    heads, blocks, others = mQ.shape[:2], cute.sym_int(), cute.sym_int()

    def ints(*shape):
        strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
        return make_fake_tensor(Int32, shape, strides, assumed_align=4)

    return [ints(*heads, blocks, *rest) for _ in range(2) for rest in ((), (others,))]


def fake_extras(mQ: cute.Tensor, features: Features) -> tuple:
    """What `Extras.of` takes after the scale."""
    # Packed tensors are (T, H, D), and the number of sequences is another one.
    batch, heads = (cute.sym_int() if features.varlen else mQ.shape[0]), mQ.shape[1]

    def floats(*shape):
        strides = tuple(cute.sym_int64() for _ in shape)
        return make_fake_tensor(Float32, shape, strides, assumed_align=4)

    def compact(dtype, size, align):
        return make_fake_compact_tensor(dtype, (size,), assumed_align=align)

    return (
        Float32(1.0) if features.softcap else None,
        floats(batch, heads) if features.alibi else None,
        floats(heads) if features.sinks else None,
        Int32(0) if features.dropout else None,
        Float32(1.0) if features.dropout else None,
        compact(Int64, 2, 8) if features.dropout else None,
        compact(Float32, heads, 4) if features.return_max_logit else None,
    )
