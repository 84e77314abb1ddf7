"""The tensors that every kernel of a direction is compiled for: dynamic sizes and strides, static D.

Packed batches have (T, H, D) in the place of (B, H, S, D), and statistics (H, T).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cute_flash.planning.varlen import ITEM
from cute_flash.spec.problem import Static

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


def out_dtype(static: Static):
    """Of the output, and of its gradient as a caller gives it."""
    return Float32 if static.features.out_dtype else DTYPES[static.dtype]


def fake_tensors(static: Static) -> tuple[cute.Tensor, ...]:
    """q, k, v, out (B, H, S, D) with rows aligned to 16 bytes, and lse (B, H, Sq), compact."""
    batch, heads, heads_kv, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(5))

    def tensor(num_heads, seqlen, width):
        return fake_rows(static, (batch, num_heads, seqlen, width))

    return (
        tensor(heads, seqlen_q, static.head_dim),
        tensor(heads_kv, seqlen_k, static.head_dim),
        tensor(heads_kv, seqlen_k, static.width_v),
        fake_rows(static, (batch, heads, seqlen_q, static.width_v), out_dtype(static)),
        fake_statistics(static, (batch, heads, seqlen_q)),
    )


def fake_rows(static: Static, shape: tuple, dtype=None) -> cute.Tensor:
    """(B, H, S, D), or (T, H, D), with rows aligned to 16 bytes; in the dtype of q by default."""
    if static.features.varlen:
        _batch, heads, seqlen, width = shape
        shape = (seqlen, heads, width)
    strides = (*(cute.sym_int64(divisibility=8) for _ in shape[1:]), 1)
    return make_fake_tensor(dtype or DTYPES[static.dtype], shape, strides, assumed_align=16)


def fake_statistics(static: Static, shape: tuple, align: int = 4) -> cute.Tensor:
    """(B, H, S), or (H, T), fp32, compact."""
    shape = shape[1:] if static.features.varlen else shape
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(Float32, shape, stride_order=order, assumed_align=align)


def fake_items() -> cute.Tensor:
    """A list of tiles: see `cute_flash/work.py`."""
    return make_fake_compact_tensor(Int32, (cute.sym_int(), ITEM), stride_order=(1, 0), assumed_align=16)


def fake_gradients(static: Static, dq_elements: int) -> tuple[cute.Tensor, ...]:
    """q, k, v, dO; LSE and D (B, H, Sq padded), fp32; dQ (B, H, m_block, `dq_elements`), fp32; dK, dV.

    Those in fp32 have a batch of 1 where the sequences are packed.
    """
    batch, heads, heads_kv, seqlen_q, seqlen_k, padded, blocks = (cute.sym_int() for _ in range(7))

    def tensor(num_heads, seqlen, width):
        return fake_rows(static, (batch, num_heads, seqlen, width))

    def floats(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(Float32, shape, stride_order=order, assumed_align=16)

    return (
        tensor(heads, seqlen_q, static.head_dim),
        tensor(heads_kv, seqlen_k, static.head_dim),
        tensor(heads_kv, seqlen_k, static.width_v),
        tensor(heads, seqlen_q, static.width_v),
        floats(batch, heads, padded),
        floats(batch, heads, padded),
        floats(batch, heads, blocks, dq_elements),
        tensor(heads_kv, seqlen_k, static.head_dim),
        tensor(heads_kv, seqlen_k, static.width_v),
    )


def fake_counters(dq: cute.Tensor) -> cute.Tensor:
    """Where sums of dQ are added in order: a counter for each block of sums in `dq`."""
    return make_fake_compact_tensor(Int32, dq.shape[:3], stride_order=(2, 1, 0), assumed_align=4)
