"""The scores of a warp: which keys its rows see, and the score features, whose parameters differ from row to row."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.memory.views import as_mn
from cute_flash.device.scheduling.kv_splits import Lengths, Split
from cute_flash.device.scores import alibi
from cute_flash.device.scores.mask import column_offset
from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.kernels.decode.storage import Params


class KeyRange(NamedTuple):
    """Keys from the first to the last, inclusive."""

    first: Int32
    last: Int32


@cute.jit
def visible_keys(p: Params, split: Split, sequence: Lengths, first: Int32, last: Int32) -> KeyRange:
    """The keys of a split that all queries at the positions from `first` to `last` see."""
    low, high = sequence.first_key, cutlass.min(sequence.key_len, split.end) - 1
    if cutlass.const_expr(p.window_left is not None):
        low = cutlass.max(low, last - p.window_left)
    if cutlass.const_expr(p.window_right is not None):
        high = cutlass.min(high, first + p.window_right)
    if cutlass.const_expr(p.splits.chunk is not None):
        low = cutlass.max(low, p.splits.chunk_begin(split.batch, last))
        high = cutlass.min(high, p.splits.chunk_begin(split.batch, first) + p.splits.chunk - 1)
    return KeyRange(low, high)


@dataclass(frozen=True)
class ScoreRows:
    """The rows of this thread, and the parameters of their scores."""

    tScS: cute.Tensor  # (row, key) of every score, relative to the rows and keys of the warp
    bounds: cute.Tensor  # (2, rows of this thread): first and last key that a row sees
    slopes: cute.Tensor | None  # (rows of this thread), in units of log2
    positions: cute.Tensor | None  # (rows of this thread), among the keys; None without slopes

    @cute.jit
    def transform(self, p: Params, acc_S_mn: cute.Tensor, key: Int32):
        """Apply softcap and ALiBi; the results are in units of log2. `key`: the first key of the warp."""
        has_softcap = p.score is not None and p.score.softcap is not None
        if cutlass.const_expr(has_softcap):
            p.score.softcap.apply_cap(acc_S_mn, False)
        if cutlass.const_expr(self.slopes is not None):
            first, scale = key + as_mn(self.tScS)[0, 0][1], None if has_softcap else p.score.scale_log2
            for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                alibi.apply_to_row(acc_S_mn, r, scale, self.slopes[r], Float32(self.positions[r] - first))

    @cute.jit
    def mask(self, acc_S_mn: cute.Tensor, key: Int32, num_keys: cutlass.Constexpr, common: KeyRange):
        """Set the scores of keys that a row does not see to -inf, among `num_keys` keys from `key` on.

        `common`: the keys that all rows see.
        """
        if key < common.first or key + num_keys - 1 > common.last:
            first = key + as_mn(self.tScS)[0, 0][1]
            for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                low, high = self.bounds[0, r] - first, self.bounds[1, r] - first
                for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                    offset = column_offset(c)
                    is_masked = offset > high or offset < low
                    acc_S_mn[r, c] = -Float32.inf if is_masked else acc_S_mn[r, c]

    @cute.jit
    def mask_missing(self, acc_S_mn: cute.Tensor, exists: cute.Tensor, first_key: Int32):
        """Set the scores of keys without a page to -inf.

        `exists`: for every key of the block; `first_key`: the first key of the scores in the block.
        """
        first = first_key + as_mn(self.tScS)[0, 0][1]
        for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
            is_missing = exists[first + column_offset(c)] == 0
            for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                acc_S_mn[r, c] = -Float32.inf if is_missing else acc_S_mn[r, c]


@cute.jit
def score_rows(p: Params, split: Split, sequence: Lengths, tScS: cute.Tensor, first_row: Int32) -> ScoreRows:
    """The rows of this thread. `first_row`: the warp's first row of the query tile."""
    rows = cute.size(as_mn(tScS), mode=[0])
    bounds = cute.make_rmem_tensor((2, rows), Int32)
    slopes = positions = None
    if cutlass.const_expr(p.alibi_slopes is not None):
        slopes, positions = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Int32)
    for r in cutlass.range_constexpr(rows):
        row = cutlass.min(first_row + as_mn(tScS)[r, 0][0], p.num_rows(split, sequence) - 1)
        query = p.query_row(split, row)
        position = sequence.key_len - sequence.tokens + query.token_in_sequence
        bounds[0, r], bounds[1, r] = visible_keys(p, split, sequence, position, position)
        if cutlass.const_expr(slopes is not None):
            slopes[r], positions[r] = p.alibi_slopes[split.batch, query.head] * LOG2_E, position
    return ScoreRows(tScS, bounds, slopes, positions)


def common_keys(p: Params, split: Split, sequence: Lengths) -> KeyRange:
    """The keys of a split that all queries of the sequence see."""
    return visible_keys(p, split, sequence, sequence.key_len - sequence.tokens, sequence.key_len - 1)
