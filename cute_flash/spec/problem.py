"""What is asked for: a frozen description of one attention call, and the checks that refuse it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cute_flash.errors import UnsupportedError
from cute_flash.score_mod.limits import BLOCK_MASK_MULTIPLE, LONG_MOD_OPS, MAX_INDEX
from cute_flash.spec.band import NARROW, Band, is_narrow
from cute_flash.spec.features import MODS, backward_features, feature_cost

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 8, 256, 8
GPU_DTYPES = ("float16", "bfloat16")
CPU_DTYPES = ("float16", "bfloat16", "float32", "float64")
# The kernels' tangent errs by 2^-23 of the cap.
MAX_SOFTCAP = 1 << 14
# Draws are compared as 16-bit floats, and a threshold must be a number, or infinity.
MAX_DROPOUT = 0x7C00 / 0x8000


@dataclass(frozen=True)
class Support:
    """The answer of `supports()`: true or false, with the reason."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Static:
    """The part of a problem that is compiled into a kernel. Everything else is a run-time argument."""

    dtype: str
    head_dim: int
    has_left: bool = False
    has_right: bool = False
    head_dim_v: int | None = None  # of V and of the output, where it differs
    pack_gqa: bool = False  # rows are (query head of a group, position): the mask wraps around
    features: tuple[str, ...] = ()  # names of `spec.features.FEATURES`
    mods: Any = None  # a `score_mod.mod_spec.ModSpec`: user functions, bias and block mask
    varlen: bool = False
    seqused_k: bool = False
    block_sparse: bool = False  # K/V blocks come from the index lists of a block mask
    out_fp32: bool = False
    batch_invariant: bool = False
    deterministic: bool = False  # dQ is accumulated in a fixed order, by a semaphore
    has_dlse: bool = False
    overlaps_next: bool = False  # the next kernel is launched early and waits for the end of this one

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def widest(self) -> int:
        """The width of a tile that holds K and V alike."""
        return max(self.head_dim, self.width_v)

    @property
    def is_bounded(self) -> bool:
        return self.has_left or self.has_right

    @property
    def has_mods(self) -> bool:
        """Whether there is a bias, a user function or a block mask."""
        return self.block_sparse or any(name in MODS for name in self.features)

    @property
    def base_cost(self) -> int:
        """Registers that the features need, whatever the user functions do; see `feature_cost`."""
        return feature_cost(self.features, self.block_sparse)

    @property
    def feature_cost(self) -> int:
        """Registers that a forward kernel needs more than a plain one, in units of the tile tables."""
        if self.mods is None:
            return self.base_cost
        is_scattered = bool(self.mods.bias_dtype) and not self.mods.bias_paired_loads
        is_long = self.mods.ops_per_score > LONG_MOD_OPS or is_scattered
        more = 8 * is_long + (self.mods.bias_dtype == "float32") - self.mods.has_cheap_fusion
        return self.base_cost + more

    @property
    def k_steps(self) -> tuple[range | None, range | None]:
        """Steps of 16 columns of the products over the columns of K, and of V, in a tile as wide as both;
        None: all.
        """
        if self.head_dim_v is None:
            return None, None
        return range(-(-self.head_dim // 16)), range(-(-self.head_dim_v // 16))

    @property
    def widths(self) -> str:
        """In the names of kernels."""
        return f"{self.head_dim}" + ("" if self.head_dim_v is None else f"v{self.head_dim_v}")

    @property
    def tags(self) -> tuple[str, ...]:
        """What sets it apart from plain attention, in the names of kernels."""
        geometry = ("varlen", "block_sparse", "out_fp32", "batch_invariant", "deterministic")
        return (*(name for name in geometry if getattr(self, name)), *self.features)


@dataclass(frozen=True)
class Problem:
    """Shapes, dtype, mask, features, geometry and policy of one call.

    q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv). With varlen, B is the number of sequences, and Sq and
    Sk count the tokens of all of them.
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str = "bfloat16"
    band: Band = field(default_factory=Band)
    head_dim_v: int | None = None  # None: that of the keys
    features: tuple[str, ...] = ()  # names of `spec.features.FEATURES`
    mods: Any = None  # a `score_mod.mod_spec.ModSpec`
    varlen: bool = False
    seqused_k: bool = False
    block_sparse: bool = False
    out_fp32: bool = False
    batch_invariant: bool = False

    @property
    def width_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.heads // self.heads_kv if self.heads_kv else 1

    @cached_property
    def static(self) -> Static:
        return Static(
            dtype=self.dtype,
            head_dim=self.head_dim,
            has_left=self.band.left is not None,
            has_right=self.band.right is not None,
            head_dim_v=None if self.width_v == self.head_dim else self.width_v,
            features=self.features,
            mods=self.mods,
            varlen=self.varlen,
            block_sparse=self.block_sparse,
            out_fp32=self.out_fp32,
            batch_invariant=self.batch_invariant,
        )

    @property
    def backward_features(self) -> tuple[str, ...]:
        return backward_features(self.features)

    @property
    def usual_keys(self) -> int:
        """Keys that a query may see; of a varlen batch, on the average.

        A window only counts as narrow or not: its bounds are no part of a plan.
        """
        if is_narrow(self.band.left, self.band.right):
            return min(self.seqlen_k, NARROW // 2)
        return -(-self.seqlen_k // max(self.batch, 1)) if self.varlen else self.seqlen_k

    @property
    def is_empty(self) -> bool:
        """No output row, or no key that could be seen: nothing to launch."""
        return 0 in (self.batch, self.heads, self.seqlen_q, self.seqlen_k)

    def check(self, device: str = "cuda") -> None:
        """Raise `ValueError` for contradictions, `UnsupportedError` for what `device` has no kernel for."""
        for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative")
        check_heads(self.heads, self.heads_kv)
        check_window((self.band.left, self.band.right))
        dtypes = GPU_DTYPES if device == "cuda" else CPU_DTYPES
        if self.dtype not in dtypes:
            raise UnsupportedError(f"dtype {self.dtype} on {device}: use one of {', '.join(dtypes)}")
        if device != "cuda" and self.batch_invariant:
            raise UnsupportedError(f"batch_invariant on {device}: only on cuda")
        if device == "cuda":
            check_head_dim(self.head_dim)
            check_head_dim(self.width_v)


def check_heads(heads: int, heads_kv: int) -> None:
    if heads_kv == 0 and heads == 0:
        return
    if heads_kv == 0 or heads % heads_kv:
        raise ValueError(f"q has {heads} heads and k, v have {heads_kv}: the first must be a multiple of the second")


def check_window(window: tuple[int | None, int | None]) -> None:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window={window!r}: give (left, right), a number of keys or None for each side")
    for side, value in zip(("left", "right"), window, strict=True):
        if isinstance(value, float):
            raise ValueError(f"window {side}={value}: use a whole number of keys, or None for an unbounded side")
        if value is not None and value < 0:
            raise ValueError(f"window {side}={value} is negative: use None for an unbounded side, 0 for 'up to itself'")


def check_tile_fits_mods(problem: Problem, tile_m: int, tile_n: int, deterministic: bool = False) -> None:
    """Raise `UnsupportedError` for user functions and block masks that a kernel with this tile cannot serve, or
    whose gradients it accumulates in no fixed order.

    Positions are computed in floats where that is exact. A tile lies within one block of the block mask.
    """
    if deterministic and (problem.block_sparse or (problem.mods and problem.mods.captures_needing_grad)):
        what = "a block_mask" if problem.block_sparse else "the captured tensors of score_mod"
        raise UnsupportedError(
            f"deterministic gradients with {what} on cuda: they are added in any order; leave it out, or "
            "move the tensors to the CPU"
        )
    for name in ("seqlen_q", "seqlen_k"):
        if problem.static.has_mods and getattr(problem, name) >= MAX_INDEX:
            raise UnsupportedError(f"{name}={getattr(problem, name)} with functions: less than {MAX_INDEX}")
    rows, keys = (None if problem.mods is None else problem.mods.block_mask_tile) or (tile_m, tile_n)
    if rows % tile_m or keys % tile_n:
        raise UnsupportedError(
            f"block_mask of blocks of {rows} x {keys} on cuda: kernels have tiles of {tile_m} x {tile_n}; "
            f"make it of blocks of multiples of {BLOCK_MASK_MULTIPLE} x {BLOCK_MASK_MULTIPLE}"
        )


def check_varlen_mods_backward(problem: Problem) -> None:
    """Raise `UnsupportedError`: no backward kernel has user functions in varlen batches."""
    if problem.varlen and problem.static.has_mods:
        name = next((name for name in problem.features if name in MODS), "block_mask")
        raise UnsupportedError(
            f"the gradient of attn_varlen with {name} on cuda: there is no backward kernel yet; move the "
            "tensors to the CPU, or call it under torch.no_grad()"
        )


def check_softcap(softcap: float) -> None:
    if softcap > MAX_SOFTCAP:
        raise UnsupportedError(
            f"softcap={softcap} on cuda: at most {MAX_SOFTCAP}; leave it out, as it hardly changes a score"
        )


def check_dropout(dropout: float) -> None:
    if dropout > MAX_DROPOUT:
        raise UnsupportedError(f"dropout={dropout} on cuda: at most {MAX_DROPOUT}")


def check_head_dim(head_dim: int) -> None:
    if MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_STEP == 0:
        return
    nearest = min(max(math.ceil(head_dim / HEAD_DIM_STEP) * HEAD_DIM_STEP, MIN_HEAD_DIM), MAX_HEAD_DIM)
    remedy = "pad q, k, v with zeros to it" if nearest >= head_dim else "split the heads"
    raise UnsupportedError(
        f"head_dim={head_dim}: kernels take multiples of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} "
        f"to {MAX_HEAD_DIM}; "
        f"the nearest is {nearest} ({remedy}, and pass scale= explicitly)"
    )
