"""What is asked for: a frozen description of one attention call, and the errors that refuse it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from cute_flash.errors import UnsupportedError
from cute_flash.score_mod.limits import BLOCK_MASK_MULTIPLE, LONG_MOD_OPS, MAX_INDEX
from cute_flash.spec.band import NARROW, Band, is_narrow

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 8, 256, 8
GPU_DTYPES = ("float16", "bfloat16")
CPU_DTYPES = ("float16", "bfloat16", "float32", "float64")


# What kernels have beyond plain attention.
WRITTEN_FEATURES = ("bias", "score_mod", "mask_mod", "block_map")
FORWARD_FEATURES = (
    "varlen", "softcap", "alibi", "sinks", "dropout", "return_max_logit", "seqused_k", "out_dtype",
    "batch_invariant", *WRITTEN_FEATURES,
)  # fmt: skip
# The kernels' tangent errs by 2^-23 of it.
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
class Features:
    """What a call asks for beyond q, k, v and a band. Presence is compiled in; values are run-time."""

    varlen: bool = False  # q, k, v packed as (T, H, D), with offsets of sequences
    softcap: bool = False
    alibi: bool = False  # slopes are (B, H): a call's (H) has a batch stride of 0
    sinks: bool = False
    dropout: bool = False
    return_max_logit: bool = False
    seqused_k: bool = False
    out_dtype: bool = False  # out is fp32, and so is its gradient
    batch_invariant: bool = False  # bits of a row do not depend on what else is in a call
    bias: bool = False
    score_mod: bool = False
    mask_mod: bool = False
    block_map: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that ask for them."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name))

    @property
    def weight(self) -> int:
        """How many more registers a forward kernel needs with them, in no unit."""
        heavy, light = 4 * self.dropout + 3 * self.softcap, self.sinks + self.return_max_logit
        written = self.bias + self.score_mod + self.mask_mod
        more = (4 if written else self.block_map) + 8 * (written > 1)
        return heavy + 2 * self.alibi + light + more

    @property
    def is_written(self) -> bool:
        """Whether kernels take a bias, functions or a block map."""
        return self.bias or self.score_mod or self.mask_mod or self.block_map

    @cached_property
    def in_gradients(self) -> Features:
        """What the main kernel of the gradients has: sinks are in the LSE, the largest logit has none, and a
        gradient in fp32 is rounded before.
        """
        return replace(self, sinks=False, return_max_logit=False, out_dtype=False, batch_invariant=False)

    @cached_property
    def has_plain_gradients(self) -> bool:
        """Whether nothing is left of them in the gradients."""
        return replace(self, return_max_logit=False, batch_invariant=False) == PLAIN


PLAIN = Features()


@dataclass(frozen=True)
class Static:
    """The part of a problem that is compiled into a kernel. Everything else is a run-time argument."""

    dtype: str
    head_dim: int
    has_left: bool
    has_right: bool
    head_dim_v: int | None = None  # of V and of the output, where it is another one
    packs_heads: bool = False  # rows are (query head of a group, position): the mask wraps around
    features: Features = PLAIN
    mods: Any = None  # a `score_mod.mod_spec.ModSpec`

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def is_bounded(self) -> bool:
        return self.has_left or self.has_right

    @property
    def weight(self) -> int:
        """`Features.weight`, and more of functions that do much for every score and of a wide bias."""
        if self.mods is None:
            return self.features.weight
        is_scattered = bool(self.mods.bias_dtype) and not self.mods.bias_paired_loads
        is_long = self.mods.ops_per_score > LONG_MOD_OPS or is_scattered
        more = 8 * is_long + (self.mods.bias_dtype == "float32") - self.mods.has_cheap_fusion
        return self.features.weight + more

    @property
    def widest(self) -> int:
        """What a tile must have room for that is as wide for values as for keys."""
        return max(self.head_dim, self.width_v)

    @property
    def k_steps(self) -> tuple[range | None, range | None]:
        """Steps of 16 columns that products over the columns of keys, and of values, take in a tile as wide
        as both; None: all.
        """
        if self.head_dim_v is None:
            return None, None
        return range(-(-self.head_dim // 16)), range(-(-self.head_dim_v // 16))

    @property
    def widths(self) -> str:
        """In the names of kernels."""
        return f"{self.head_dim}" + ("" if self.head_dim_v is None else f"v{self.head_dim_v}")


@dataclass(frozen=True)
class Problem:
    """Shapes, dtype and mask of one call: q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv).

    Of a packed batch, B sequences, Sq and Sk are bounds of their lengths; for kernels, all of them together.
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
    features: Features = PLAIN
    mods: Any = None  # a `score_mod.mod_spec.ModSpec`

    @property
    def width_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.heads // self.heads_kv if self.heads_kv else 1

    @cached_property
    def static(self) -> Static:
        width_v = None if self.width_v == self.head_dim else self.width_v
        bounds = self.band.left is not None, self.band.right is not None
        return Static(self.dtype, self.head_dim, *bounds, width_v, features=self.features, mods=self.mods)

    @property
    def usual_keys(self) -> int:
        """That a query may see; of a packed batch, whose keys are counted together, on the average.

        Of windows it is asked only whether they are narrow: their values are no part of a plan.
        """
        if is_narrow(self.band.left, self.band.right):
            return min(self.seqlen_k, NARROW // 2)
        return -(-self.seqlen_k // max(self.batch, 1)) if self.features.varlen else self.seqlen_k

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
        if device != "cuda" and self.features.batch_invariant:
            raise UnsupportedError(f"batch_invariant on {device}: only on cuda")
        if device == "cuda":
            check_head_dim(self.head_dim)
            check_head_dim(self.width_v)
            check_features(self.features)


def check_heads(heads: int, heads_kv: int) -> None:
    if heads_kv == 0 and heads == 0:
        return
    if heads_kv == 0 or heads % heads_kv:
        raise ValueError(
            f"q has {heads} heads and k, v have {heads_kv}: the first must be a multiple of the second"
        )


def check_window(window: tuple[int | None, int | None]) -> None:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window={window!r}: give (left, right), a number of keys or None for each side")
    for side, value in zip(("left", "right"), window, strict=True):
        if isinstance(value, float):
            raise ValueError(
                f"window {side}={value}: use a whole number of keys, or None for an unbounded side"
            )
        if value is not None and value < 0:
            raise ValueError(
                f"window {side}={value} is negative: use None for an unbounded side, 0 for 'up to itself'"
            )


def check_features(features: Features) -> None:
    """Raise `UnsupportedError` for what no forward kernel has."""
    for name in features.names:
        if name not in FORWARD_FEATURES:
            raise UnsupportedError(
                f"{name} on cuda: no kernel has it yet; move the tensors to the CPU, or leave {name} out"
            )


def check_written(problem: Problem, tile_m: int, tile_n: int, deterministic: bool = False) -> None:
    """Raise `UnsupportedError` for functions and block maps that a kernel of some tile does not take, or
    whose gradients it adds up in any order.

    Functions are computed in floats where that is exact. A tile lies within one block of the map, which then
    decides for all of it.
    """
    has_captures = problem.mods is not None and bool(problem.mods.captures_needing_grad)
    what = "captured tensors of score_mod" if has_captures else ""
    what = "a block_map" if problem.features.block_map else what
    if deterministic and what:
        raise UnsupportedError(
            f"deterministic gradients with {what} on cuda: they are added in any order; leave it out, or "
            "move the tensors to the CPU"
        )
    for name in ("seqlen_q", "seqlen_k"):
        if problem.features.is_written and getattr(problem, name) >= MAX_INDEX:
            raise UnsupportedError(f"{name}={getattr(problem, name)} with functions: less than {MAX_INDEX}")
    rows, keys = (None if problem.mods is None else problem.mods.block_mask_tile) or (tile_m, tile_n)
    if rows % tile_m or keys % tile_n:
        raise UnsupportedError(
            f"block_map of blocks of {rows} x {keys} on cuda: kernels have tiles of {tile_m} x {tile_n}; "
            f"make it of blocks of multiples of {BLOCK_MASK_MULTIPLE} x {BLOCK_MASK_MULTIPLE}"
        )


def check_written_gradients(features: Features) -> None:
    """Raise `UnsupportedError` for what no backward kernel has: functions in packed sequences."""
    if features.varlen and features.is_written:
        name = next(name for name in WRITTEN_FEATURES if getattr(features, name))
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
