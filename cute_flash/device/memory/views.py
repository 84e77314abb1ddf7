"""Views of MMA accumulators that are the same for mma.sync and wgmma.

An accumulator of mma.sync m16n8k16 is ((2, 2), MMA_M, MMA_N): a pair of columns, a pair of rows 8 apart, then the
tiles. An accumulator of wgmma m64nNk16 is ((2, 2, N/8), MMA_M, MMA_N): the n8 tiles are inside the instruction. The
rest of the code uses the (m, n) view of both: rows of this thread, columns of this thread.
"""

import cutlass.cute as cute


def as_mn(acc: cute.Tensor) -> cute.Tensor:
    """((2, 2, ...), MMA_M, MMA_N) -> ((2, MMA_M), (2, ..., MMA_N))."""
    (cols, rows, *inner), tiles_m, tiles_n = acc.layout.shape
    (col_stride, row_stride, *inner_stride), m_stride, n_stride = acc.layout.stride
    layout = cute.make_layout(
        ((rows, tiles_m), (cols, *inner, tiles_n)),
        stride=((row_stride, m_stride), (col_stride, *inner_stride, n_stride)),
    )
    return cute.make_tensor(acc.iterator, layout)


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """((2, 2, ...), MMA_M, MMA_N) -> ((2, 2, 2), MMA_M, MMA_K): two n8 tiles of C are one k16 tile of A."""
    pair, tiles_m, tiles_n = acc.layout.shape
    pair_stride, m_stride, n_stride = acc.layout.stride
    if len(pair) == 3:
        # wgmma: the n8 tiles are the third mode of the instruction.
        (*pair, tiles_n), (*pair_stride, n_stride) = pair, pair_stride
    (two, tiles_k), (two_stride, k_stride) = (2, tiles_n // 2), (n_stride, 2 * n_stride)
    operand = cute.make_layout(
        ((*pair, two), tiles_m, tiles_k), stride=((*pair_stride, two_stride), m_stride, k_stride)
    )
    return cute.make_tensor(acc.iterator, operand)


def transposed(sX: cute.Tensor) -> cute.Tensor:
    """View (rows, columns, ...) as (columns, rows, ...)."""
    modes = [1, 0, *range(2, cute.rank(sX))]
    return cute.make_tensor(sX.iterator, cute.select(sX.layout, mode=modes))
