"""`Problem`, the description of one attention call, its compiled-in part `Static`, and the limits of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cute_flash.errors import UnsupportedError
from cute_flash.score_mod.limits import BLOCK_MASK_MULTIPLE, LONG_MOD_OPS, MAX_INDEX
from cute_flash.spec.band import NARROW, Band
from cute_flash.spec.bias import BiasLayout
from cute_flash.spec.features import MODS, feature_cost

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 8, 512, 8
# Of queries and keys in a forward on Hopper, whose values have at most MAX_HEAD_DIM columns: the width of latent
# attention (MLA) with rotary columns.
MAX_HEAD_DIM_QK = 576
GPU_DTYPES = ("float16", "bfloat16", "float32")
# fp32 kernels hold two 16-bit pieces of each element in shared memory.
MAX_HEAD_DIM_FP32 = 128
CPU_DTYPES = ("float16", "bfloat16", "float32", "float64")
TOO_WIDE = (
    "use torch's SDPA with SDPBackend.EFFICIENT_ATTENTION or SDPBackend.MATH, or move the tensors to the CPU, whose "
    "reference path takes any head dim"
)
# The largest softcap: the kernels' tanh gives a score an error of 2^-23 · softcap.
MAX_SOFTCAP = 1 << 14
# The largest dropout: kernels compare random numbers with the threshold as fp16 bit patterns, and patterns above
# 0x7C00 (infinity) are NaN.
MAX_DROPOUT = 0x7C00 / 0x8000


@dataclass(frozen=True)
class Support:
    """The result of `supports()`. Its truth value is `ok`.

    Attributes:
        ok: Whether the call is supported.
        reason: The error message that the call would raise; "" if it is supported.

    Examples:
        >>> import torch, cute_flash
        >>> x = torch.empty(1, 4, 16, 64)
        >>> support = cute_flash.supports(x, x, x, softcap=-1.0)
        >>> bool(support), support.reason
        (False, 'softcap=-1.0: use a positive number, or None for no cap')
    """

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Static:
    """The part of a problem that is compiled into a kernel. Everything else is a run-time argument.

    `Problem.static` sets the fields that follow from the call. Planning sets pack_gqa, seqused_k, deterministic,
    has_dlse and overlaps_next for each launch.
    """

    dtype: str
    head_dim: int
    has_left: bool = False
    has_right: bool = False
    head_dim_v: int | None = None  # of V and of the output; None: equal to head_dim
    pack_gqa: bool = False  # a tile has rows of all query heads of a group; the mask uses row % seqlen_q
    features: tuple[str, ...] = ()  # names of `spec.features.FEATURES`
    mods: Any = None  # a `score_mod.mod_spec.ModSpec`: user mods, bias and block mask
    varlen: bool = False
    seqused_k: bool = False  # for the varlen scheduler; other kernels read the lengths from its tile list
    block_sparse: bool = False  # K/V blocks come from the index lists of a block mask
    out_fp32: bool = False
    batch_invariant: bool = False
    deterministic: bool = False  # dQ is accumulated in a fixed order, by a semaphore
    has_dlse: bool = False
    overlaps_next: bool = False  # the next kernel starts early (programmatic dependent launch)
    dropout_origin: bool = False  # the dropout mask is that of a shard (`AttentionArgs.dropout_origin`)
    has_chunk: bool = False  # has_left and has_right are then set too; a window bound may be one that masks nothing

    @property
    def is_fp32(self) -> bool:
        """Whether q, k and v are fp32: products are made of fp16 pieces, see `device.mma.split_fp32`."""
        return self.dtype == "float32"

    @property
    def mma_dtype(self) -> str:
        return "float16" if self.is_fp32 else self.dtype

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def widest(self) -> int:
        """The larger head dim, the width of a tile that can hold K or V."""
        return max(self.head_dim, self.width_v)

    @property
    def is_bounded(self) -> bool:
        return self.has_left or self.has_right

    @property
    def has_mods(self) -> bool:
        """Whether there is a bias, a score_mod, a mask_mod or a block mask."""
        return self.block_sparse or any(name in MODS for name in self.features)

    @property
    def base_cost(self) -> int:
        """`feature_cost` without the part that depends on the operations of user mods and the layout of the bias."""
        return feature_cost(self.features, self.block_sparse)

    @property
    def feature_cost(self) -> int:
        """Additional registers of a forward kernel over plain attention, in the unit of `planning.tiles.common`."""
        if self.mods is None:
            return self.base_cost
        is_scattered = bool(self.mods.bias_dtype) and not self.mods.bias_paired_loads
        is_long = self.mods.ops_per_score > LONG_MOD_OPS or is_scattered
        mod_cost = 8 * is_long + (self.mods.bias_dtype == "float32") - self.mods.has_cheap_fusion
        return self.base_cost + mod_cost

    def element_dtype(self, element: str) -> str:
        """The dtype of an operand's element type: "dtype" is that of q, "out" that of the output and its gradient."""
        return "float32" if element == "out" and self.out_fp32 else self.dtype

    @property
    def k_steps(self) -> tuple[range | None, range | None]:
        """The MMA k-steps, of 16 columns, over the head dims of K and of V in a tile of the larger width.

        None: all steps of the tile.
        """
        if self.head_dim_v is None:
            return None, None
        return range(-(-self.head_dim // 16)), range(-(-self.head_dim_v // 16))

    @property
    def widths(self) -> str:
        """The head dims, for kernel names."""
        return f"{self.head_dim}" + ("" if self.head_dim_v is None else f"v{self.head_dim_v}")

    @property
    def tags(self) -> tuple[str, ...]:
        """The options and score features of the kernel, for its name."""
        options = ("varlen", "block_sparse", "out_fp32", "batch_invariant", "deterministic", "dropout_origin")
        return (*(name for name in options if getattr(self, name)), *self.features)


@dataclass(frozen=True)
class Problem:
    """Shapes, dtype, mask, score features and options of one call.

    q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv). With varlen, B is the number of sequences, and Sq and Sk are
    the total numbers of tokens.
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str = "bfloat16"
    band: Band = field(default_factory=Band)
    head_dim_v: int | None = None  # None: equal to head_dim
    features: tuple[str, ...] = ()  # names of `spec.features.FEATURES`
    mods: Any = None  # a `score_mod.mod_spec.ModSpec`
    varlen: bool = False
    seqused_k: bool = False
    block_sparse: bool = False
    out_fp32: bool = False
    batch_invariant: bool = False
    dropout_origin: bool = False
    bias: BiasLayout | None = None
    capture_shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors that user mods capture

    @property
    def width_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.seqlen_q, self.seqlen_k

    @property
    def batch_dim(self) -> int:
        """The batch size of per-head buffers: 1 for varlen, where a head has the tokens of all sequences."""
        return 1 if self.varlen else self.batch

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.heads // self.heads_kv if self.heads_kv else 1

    @cached_property
    def static(self) -> Static:
        return Static(
            dtype=self.dtype,
            head_dim=self.head_dim,
            has_left=self.band.has_left,
            has_right=self.band.has_right,
            head_dim_v=None if self.width_v == self.head_dim else self.width_v,
            features=self.features,
            mods=self.mods,
            varlen=self.varlen,
            block_sparse=self.block_sparse,
            out_fp32=self.out_fp32,
            batch_invariant=self.batch_invariant,
            dropout_origin=self.dropout_origin,
            has_chunk=self.band.chunk is not None,
        )

    @property
    def usual_keys(self) -> int:
        """An estimate of the number of keys that a query sees, for the choice of a tile.

        For a varlen batch, it is the average length. A narrow window or chunk counts as `NARROW // 2` keys, so that
        plans do not depend on its exact size.
        """
        if self.band.is_narrow:
            return min(self.seqlen_k, NARROW // 2)
        return -(-self.seqlen_k // max(self.batch, 1)) if self.varlen else self.seqlen_k

    @property
    def is_empty(self) -> bool:
        """Whether there are no queries or no keys. Nothing is launched then."""
        return 0 in (self.batch, self.heads, self.seqlen_q, self.seqlen_k)

    def check(self, device: str = "cuda") -> None:
        """Raise `ValueError` for invalid sizes, `UnsupportedError` if `device` has no kernel for the problem."""
        for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative")
        check_heads(self.heads, self.heads_kv)
        check_window(self.band.bounds)
        check_chunk(self.band.chunk)
        dtypes = GPU_DTYPES if device == "cuda" else CPU_DTYPES
        if self.dtype not in dtypes:
            raise UnsupportedError(f"dtype {self.dtype} on {device}: use one of {', '.join(dtypes)}")
        if device != "cuda" and self.batch_invariant:
            raise UnsupportedError(f"batch_invariant on {device}: only on cuda")
        if device == "cuda":
            most = MAX_HEAD_DIM if self.head_dim_v is None else MAX_HEAD_DIM_QK
            is_in_range = self.head_dim <= most and self.width_v <= MAX_HEAD_DIM
            # Before `check_head_dim`, whose message could suggest a head dim that is too wide for fp32.
            if self.static.is_fp32 and MAX_HEAD_DIM_FP32 < self.static.widest and is_in_range:
                widest = f"head_dim={self.static.widest} of float32 on cuda"
                raise UnsupportedError(f"{widest}: at most {MAX_HEAD_DIM_FP32}; use bfloat16 or float16")
            check_head_dim(self.width_v)
            check_head_dim(self.head_dim, most)

    def check_gradients(self, device: str = "cuda") -> None:
        """Raise `UnsupportedError` if `device` computes no gradients of the problem, whatever its sizes.

        `planning.plan_backward` has the refusals that depend on sizes, the GPU and the kernel family.
        """
        if self.mods is not None and self.mods.graphs.score is not None:
            self.mods.graphs.gradient(self.mods.captures_needing_grad)
        if device == "cuda" and self.head_dim > MAX_HEAD_DIM:
            raise UnsupportedError(f"the gradient of head_dim={self.head_dim}: at most {MAX_HEAD_DIM}; {TOO_WIDE}")
        if device == "cuda" and self.static.is_fp32 and "score_mod" in self.features:
            # The fp16 pieces of dS are scaled by an upper bound of |dS|, which a score_mod may exceed.
            raise UnsupportedError(
                "the gradient of a score_mod, or of attn_varlen with a bias, in float32 on cuda: there is no such "
                "kernel; use bfloat16 or float16"
            )


def check_heads(heads: int, heads_kv: int) -> None:
    if heads_kv == 0 and heads == 0:
        return
    if heads_kv == 0 or heads % heads_kv:
        raise ValueError(f"q has {heads} heads and k, v have {heads_kv}: the first must be a multiple of the second")


def check_window(window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window={window!r}: give (left, right), a number of keys or None for each side")
    left, right = window
    for side, value in (("left", left), ("right", right)):
        if isinstance(value, float):
            raise ValueError(f"window {side}={value}: use a whole number of keys, or None for an unbounded side")
        if value is not None and value < 0:
            raise ValueError(f"window {side}={value} is negative: use None for an unbounded side, 0 for 'up to itself'")
    return window


def check_chunk(chunk: int | None) -> None:
    if chunk is not None and chunk < 1:
        raise ValueError(f"attention_chunk={chunk}: use a positive number of keys, or None or 0 for no chunks")


def check_tile_fits_mods(problem: Problem, tile_m: int, tile_n: int, deterministic: bool = False) -> None:
    """Raise `UnsupportedError` if a kernel with this tile does not support the mods or the block mask of a problem.

    Positions must be exact in fp32, and a tile must lie within one block of the block mask. Gradients of captured
    tensors of a varlen batch cannot be deterministic.
    """
    if deterministic and problem.varlen and problem.mods and problem.mods.captures_needing_grad:
        raise UnsupportedError(
            "deterministic gradients of tensors that score_mod captures, of attn_varlen on cuda: they are summed from "
            "one number per score, and the host does not know how many scores there are; leave out deterministic, "
            "call attn for each sequence, or move the tensors to the CPU"
        )
    for name in ("seqlen_q", "seqlen_k"):
        if problem.static.has_mods and getattr(problem, name) >= MAX_INDEX:
            raise UnsupportedError(
                f"{name}={getattr(problem, name)} with a bias, mods or a block mask on cuda: use less than {MAX_INDEX}"
            )
    rows, keys = (None if problem.mods is None else problem.mods.block_mask_tile) or (tile_m, tile_n)
    if rows % tile_m or keys % tile_n:
        raise UnsupportedError(
            f"block_mask of blocks of {rows} x {keys} on cuda: kernels have tiles of {tile_m} x {tile_n}; "
            f"use blocks that are multiples of {BLOCK_MASK_MULTIPLE} x {BLOCK_MASK_MULTIPLE}"
        )


def check_softcap(softcap: float) -> None:
    if softcap > MAX_SOFTCAP:
        raise UnsupportedError(
            f"softcap={softcap} on cuda: at most {MAX_SOFTCAP}; leave it out, because it hardly changes a score"
        )


def check_dropout(dropout: float) -> None:
    if dropout > MAX_DROPOUT:
        raise UnsupportedError(f"dropout={dropout} on cuda: at most {MAX_DROPOUT}")


def check_head_dim(head_dim: int, most: int = MAX_HEAD_DIM) -> None:
    if MIN_HEAD_DIM <= head_dim <= most and head_dim % HEAD_DIM_STEP == 0:
        return
    taken = f"head_dim={head_dim}: kernels take multiples of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if most > MAX_HEAD_DIM:
        taken += f", and up to {most} in a forward on Hopper"
    if head_dim > most:
        raise UnsupportedError(f"{taken}; {TOO_WIDE}")
    nearest = max(math.ceil(head_dim / HEAD_DIM_STEP) * HEAD_DIM_STEP, MIN_HEAD_DIM)
    raise UnsupportedError(
        f"{taken}; the nearest is {nearest} (pad q, k, v with zeros to it, and pass scale= explicitly)"
    )
