"""The table of kernels: the class of each, and the operands of its launch in order."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from cute_flash.spec.features import ALIBI_SLOPES, FEATURE, FEATURES, SINKS, SOFTCAP, Operand


class KernelSpec(NamedTuple):
    """A kernel class and its operands.

    `path` is "module:class" below `cute_flash.kernels`. The class is constructed from (Static, tile). Its `__call__`
    takes the stream and the operands by name; a compiled kernel takes the operands in this order.
    """

    path: str
    operands: tuple[Operand, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple([operand.name for operand in self.operands])


def _rows(name: str, *dims: str, element: str = "dtype") -> Operand:
    return Operand(name, f"rows {element}", dims)


def _scalars(type: str, *names: str, when: Callable[[Any], bool] | None = None) -> tuple[Operand, ...]:
    return tuple(Operand(name, type, when=when) for name in names)


def _if(field: str) -> Callable[[Any], bool]:
    """A condition for `Operand.when`: a field of the kernel's static is set."""
    read = attrgetter(f"static.{field}")
    return lambda key: bool(read(key))


def _if_wgmma_or_deterministic(key: Any) -> bool:
    return key.static.deterministic or key.tile.needs_wgmma


# ---- operands of every call
# ----------------------------------------------------------------------------------------------------------

Q, K, V = (_rows("q", "B", "H", "Sq", "D"), _rows("k", "B", "Hkv", "Sk", "D"), _rows("v", "B", "Hkv", "Sk", "Dv"))
OUT = _rows("out", "B", "H", "Sq", "Dv", element="out")
LSE = Operand("lse", "statistics f32", ("B", "H", "Sq"))
SCALE, WINDOW = Operand("scale", "f32"), _scalars("i32", "window_left", "window_right")
CHUNK = Operand("attention_chunk", "i32", when=_if("has_chunk"))
# Heads whose tiles run at the same time, because their K and V (in the backward Q, dO and dQ) fit into L2 together.
L2_GROUP = Operand("heads_per_l2_group", "i32")
# Hopper kernels: the size of the grid, and the address of the tile counter of a dynamic scheduler.
NUM_CTAS, TILE_COUNTER = Operand("num_ctas", "i32"), Operand("tile_counter", "i64")
# Number of queries of one head. With pack_gqa q has the rows of several heads, so its shape does not give the number.
SEQLEN_Q = Operand("seqlen_q", "i32")
# Index lists of a block mask (`device/scheduling/block_sparse.py`).
FWD_BLOCKS, BWD_BLOCKS = (
    Operand("block_indices", f"{direction}_block_indices", when=_if("block_sparse")) for direction in ("fwd", "bwd")
)
# Tile lists of a varlen batch, written by the scheduler kernel.
Q_TILES, KV_TILES = (Operand(name, "tile_list", when=_if("varlen")) for name in ("q_tile_list", "kv_tile_list"))
# Of a shard (`AttentionArgs.dropout_origin`): words of the Philox counter of its first row and key, its first head, and
# the number of heads of the full call.
DROPOUT_ORIGIN = _scalars(
    "i32", "dropout_first_query", "dropout_first_key", "dropout_first_head", "dropout_heads", when=_if("dropout_origin")
)
# Gradients. dQ is accumulated in fp32, in tiles whose elements are in register order.
DOUT = _rows("dout", "B", "H", "Sq", "Dv", element="out")
DOUT_CAST = _rows("dout_cast", "B", "H", "Sq", "Dv")  # dout in the dtype of q
DLSE = Operand("dlse", "statistics f32", ("B", "H", "Sq"), when=_if("has_dlse"))
LSE_LOG2 = Operand("lse_log2", "compact f32", ("B", "H", "padded Sq"))
DELTA = Operand("delta", "compact f32", ("B", "H", "padded Sq"))
DQ_ACCUM = Operand("dq_accum", "dq_accum", ("B", "H", "m_blocks"))
# The state of the additions to each m_block of dq_accum: semaphores if deterministic, else claims
# (`device.gradients.dq_claims`).
DQ_PROGRESS = Operand("dq_progress", "compact i32", ("B", "H", "m_blocks"), when=_if_wgmma_or_deterministic)
DQ = _rows("dq", "B", "H", "Sq", "D")
DK, DV = _rows("dk", "B", "Hkv", "Sk", "D"), _rows("dv", "B", "Hkv", "Sk", "Dv")
DQ_SCALE = Operand("dq_scale", "f32")
# fp32 calls: fp16 pieces of q, k and v in rows as wide as the tile, and the largest row norm of each head
# (`device.mma.split_fp32`).
Q_PIECES = Operand("q_pieces", "pieces", ("B", "H", "Sq"))
K_PIECES, V_PIECES = (Operand(f"{name}_pieces", "pieces", ("B", "Hkv", "Sk")) for name in ("k", "v"))
DOUT_PIECES = Operand("dout_cast_pieces", "pieces", ("B", "H", "Sq"))
# One term per score of the gradient of a bias, and their sums over the batch, the heads, or both, that share the bias.
DBIAS_TERMS = _rows("dbias_terms", "B", "H", "Sq", "Sk")
DBIAS_SUM = _rows("dbias_sum", "sum B", "sum H", "Sq", "Sk")
NORMS = Operand("norms", "compact f32", ("tensors", "norm batch", "H"))


def _of_features(direction: str) -> tuple[Operand, ...]:
    """The operands of all score features in one direction ("fwd" or "bwd"), in the order of `FEATURES`."""
    operands: dict[str, Operand] = {}
    for feature in FEATURES:
        operands |= {operand.name: operand for operand in getattr(feature, direction)}
    return tuple(_if_feature(operand) for operand in operands.values())


def _if_feature(operand: Operand) -> Operand:
    """The operand of score features, which a kernel takes only if it has one of these features."""
    owners = [name for name, feature in FEATURE.items() if operand in (*feature.fwd, *feature.bwd)]
    when = operand.when or (lambda key: True)
    return operand._replace(when=lambda key: any(name in key.static.features for name in owners) and when(key))


_FWD = (Q, K, V, OUT, LSE, SCALE, *WINDOW, L2_GROUP)
_PIECES = (Q_PIECES, K_PIECES, V_PIECES, NORMS)
_FWD_OPTIONAL = (CHUNK, *_of_features("fwd"), *DROPOUT_ORIGIN, FWD_BLOCKS, Q_TILES)
_BWD = (Q, K, V, DOUT_CAST, LSE_LOG2, DELTA, DQ_ACCUM, DQ_PROGRESS, DK, DV, SCALE, *WINDOW, L2_GROUP)
_BWD_PIECES = (Q_PIECES, K_PIECES, V_PIECES, DOUT_PIECES, NORMS)
_BWD_OPTIONAL = (CHUNK, *_of_features("bwd"), *DROPOUT_ORIGIN, BWD_BLOCKS, KV_TILES)
_PREPROCESS = (OUT, DOUT, LSE, LSE_LOG2, DELTA, DQ_ACCUM, DQ_PROGRESS, DLSE, Q_TILES)
_POSTPROCESS = (DQ_ACCUM, DQ, DQ_SCALE, Q_TILES)
_OFFSETS = (
    Operand("cu_seqlens_q", "compact i32", ("B + 1",), when=_if("varlen")),
    Operand("cu_seqlens_k", "compact i32", ("B + 1",), when=_if("varlen")),
    Operand("seqused_k", "compact i32", ("sequences",), when=_if("seqused_k")),
)
_SCHEDULER = (
    *_scalars("i32", "total_q", "total_k", "tile_m", "tile_n", "scheduler_left", "scheduler_right", "tile_order"),
    CHUNK,
)

# Kernels that split the keys of a query tile among CTAs. The outputs and softmax statistics of splits
# (`DecodePlan.num_slots`), and an arrival counter for each query tile.
_SPLITS = (
    Operand("partial_out", "partial_out", ("slots",)),
    Operand("partial_stats", "partial_stats", ("slots",)),
    Operand("arrivals", "compact i32", ("query tiles",)),
    *_scalars("i32", "num_splits", "num_ctas", "heads_at_once"),
)
_SPLIT_FEATURES = tuple(map(_if_feature, (ALIBI_SLOPES, SINKS, SOFTCAP)))
_SPLIT_WINDOW = (*(Operand(f"window_{side}", "i32", when=_if(f"has_{side}")) for side in ("left", "right")), CHUNK)

# Decode. q, k_new and the output have a batch of 1 if the sequences are ragged.
_CACHE = ("pages", "page rows", "Hkv")
_DECODE = (
    _rows("q", "Bq", "T", "H", "D"),
    Operand("k_cache", "rows cache", (*_CACHE, "cache D")),
    Operand("v_cache", "rows cache", (*_CACHE, "Dv")),
    _rows("out", "Bq", "T", "H", "Dv", element="out"),
    Operand("lse", "statistics f32", ("Bq", "H", "T")),
    Operand("cache_seqlens", "compact i32", ("sequences",)),
    Operand("cu_seqlens_q", "compact i32", ("sequences + 1",), when=_if("ragged")),
    Operand("page_table", "strided i32", ("sequences", "max pages"), when=_if("page_lookup")),
    Operand("cache_batch_idx", "compact i32", ("sequences",), when=_if("has_batch_idx")),
    Operand("leftpad", "compact i32", ("sequences",), when=_if("has_leftpad")),
    _rows("k_new", "Bq", "Tn", "Hkv", "D")._replace(when=_if("appends")),
    _rows("v_new", "Bq", "Tn", "Hkv", "Dv")._replace(when=_if("appends")),
    Operand("rotary_cos", "rotary", ("positions", "rotary pairs"), when=_if("rotary")),
    Operand("rotary_sin", "rotary", ("positions", "rotary pairs"), when=_if("rotary")),
    Operand("k_scale", "strided f32", ("Hkv",), when=_if("has_cache_scales")),
    Operand("v_scale", "strided f32", ("Hkv",), when=_if("has_cache_scales")),
    SCALE,
    *_SPLIT_WINDOW,
    *_SPLIT_FEATURES,
    *_SPLITS,
)

# One cache, whose first columns are the values. `head_groups`: see `DecodePlan`.
_DECODE_LATENT = (
    *[x for x in _DECODE if x.name not in ("v_cache", "v_new", "v_scale", "rotary_cos", "rotary_sin")],
    Operand("head_groups", "i32"),
)

# Merging partial outputs. The last three are lists, with an entry for each partial output.
_MERGE = (
    _rows("out", "B", "H", "S", "Dv", element="out"),
    Operand("lse", "statistics f32", ("B", "H", "S")),
    Operand("partials", "partials", ("B", "H")),
    Operand("partial_lses", "partial_lses", ("B", "H")),
    Operand("first_rows", "first_rows"),
)

KERNELS = {
    "fwd_sm80": KernelSpec("sm80.fwd:FwdSm80", (*_FWD, *_FWD_OPTIONAL)),
    "fwd_sm80_fp32": KernelSpec("sm80.fwd:FwdSm80", (*_PIECES, *_FWD[3:], *_FWD_OPTIONAL)),
    "fwd_sm90": KernelSpec("sm90.fwd:FwdSm90", (*_FWD, NUM_CTAS, SEQLEN_Q, TILE_COUNTER, *_FWD_OPTIONAL)),
    "fwd_sm90_wide": KernelSpec("sm90.fwd_wide:FwdSm90Wide", (*_FWD, NUM_CTAS, SEQLEN_Q, TILE_COUNTER, *_FWD_OPTIONAL)),
    "bwd_sm80": KernelSpec("sm80.bwd:BwdSm80", (*_BWD, *_BWD_OPTIONAL)),
    "bwd_sm80_fp32": KernelSpec("sm80.bwd:BwdSm80", (*_BWD_PIECES, *_BWD[4:], *_BWD_OPTIONAL)),
    "bwd_sm90": KernelSpec("sm90.bwd:BwdSm90", (*_BWD, NUM_CTAS, TILE_COUNTER, *_BWD_OPTIONAL)),
    "bwd_sm90_wide": KernelSpec("sm90.bwd_wide:BwdSm90Wide", (*_BWD, NUM_CTAS, TILE_COUNTER, *_BWD_OPTIONAL)),
    "bwd_sm90_cluster": KernelSpec("sm90.bwd_cluster:BwdSm90Cluster", (*_BWD, NUM_CTAS, TILE_COUNTER, *_BWD_OPTIONAL)),
    "bwd_preprocess": KernelSpec("common.preprocess:BwdPreprocess", _PREPROCESS),
    "bwd_preprocess_fp32": KernelSpec("common.preprocess:BwdPreprocess", (*_PREPROCESS, NORMS)),
    "bwd_postprocess_sm80": KernelSpec("sm80.postprocess:BwdPostprocessSm80", _POSTPROCESS),
    "bwd_postprocess_sm90": KernelSpec("sm90.postprocess:BwdPostprocessSm90", (*_POSTPROCESS, DQ_PROGRESS)),
    "bwd_sum_dbias": KernelSpec("common.sum_dbias:SumDbias", (DBIAS_TERMS, DBIAS_SUM, *WINDOW, CHUNK)),
    "split_fp32_fwd": KernelSpec("common.split_fp32:SplitFp32", (Q, K, V, *_PIECES, *_OFFSETS)),
    "split_fp32_bwd": KernelSpec("common.split_fp32:SplitFp32", (Q, K, V, DOUT_CAST, *_BWD_PIECES, *_OFFSETS)),
    # `attn` and `attn_varlen` with few queries, and `attn_decode`.
    "fwd_split_kv": KernelSpec(
        "decode.kernel:Decode", (Q, K, V, OUT, LSE, SCALE, *_SPLIT_WINDOW, *_SPLIT_FEATURES, *_OFFSETS, *_SPLITS)
    ),
    "decode": KernelSpec("decode.kernel:Decode", _DECODE),
    "decode_latent": KernelSpec("decode.kernel:Decode", _DECODE_LATENT),
    "decode_latent_sm90": KernelSpec("decode.latent_sm90:DecodeLatentSm90", _DECODE_LATENT),
    "merge_partials": KernelSpec("common.merge:MergePartials", _MERGE),
    "varlen_scheduler_fwd": KernelSpec("common.varlen_scheduler:VarlenScheduler", (*_OFFSETS, Q_TILES, *_SCHEDULER)),
    "varlen_scheduler_bwd": KernelSpec(
        "common.varlen_scheduler:VarlenScheduler", (*_OFFSETS, KV_TILES, Q_TILES, *_SCHEDULER)
    ),
}
