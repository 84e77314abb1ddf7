"""The score features, one row each, and the operands that kernels take.

A *score feature* changes or reads a score between Q Kᵀ and P V: softcap, ALiBi, sinks, dropout, bias, score_mod,
mask_mod and return_max_logit. A row of `FEATURES` has the condition under which a call has the feature, its register
cost, the operands that it adds to the forward and backward kernels, and its gradients: the workspace of the backward
and the finalizer that turns this workspace into a gradient. Geometry (varlen, block masks) and policy (deterministic,
batch_invariant, fp32 output) have no rows here: they change tiles, grids and workspace.

A kernel is called with its operands in the order of `planning.registry.KERNELS`; operands that it does not take are
None. `Operand.value` is the function that computes an argument. The bound function (`runtime.binder`) calls it with
local variables that have the names of its parameters: the call's tensors, `args`, `scale`, `problem`, `mods`, and the
plan's workspace and sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_flash.spec.bias import bias_operand
from cute_flash.spec.dropout import threshold

# Keeps scale / softcap finite. Scores capped at 1e-30 have the same softmax as zeros.
MIN_SOFTCAP = 1e-30


class Operand(NamedTuple):
    """An argument of a kernel.

    `type` is a scalar ("f32", "i32", "i64"), or a layout and an element type, such as "rows dtype", or the name of a
    method of `kernels.common.fakes.Fakes`. Layouts: "rows" (the last dimension is contiguous, rows are aligned to 16
    bytes), "statistics" (contiguous, one value per row), "compact" (contiguous) and "strided" (any strides). The
    element types "dtype", "out" and "cache" are those of q, of the output and of a K/V cache.

    Equal names in `dims` are one symbolic size per launch. `value` computes the argument; without it, the argument is
    the local variable `name` of the bound function.
    """

    name: str
    type: str
    dims: tuple[str, ...] = ()
    value: Callable[..., Any] | None = None
    when: Callable[[Any], bool] | None = None  # whether the kernel of a `CompileKey` takes it; None: always


class Buffer(NamedTuple):
    """A tensor of the workspace. `init` is "empty", "zeros" or "-inf"."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    init: str = "empty"
    # Buffers with the same `list_name` are the elements of one operand of this name.
    list_name: str = ""
    # Launches on one stream share the memory. It is zeroed once if `init` is "zeros", and kernels reset it to 0.
    is_shared: bool = False


class BwdFacts(NamedTuple):
    """The facts that decide the workspace of a feature's gradient."""

    problem: Any  # spec.problem.Problem
    tile: Any
    deterministic: bool
    num_kv_blocks: int  # of a head


class Gradient(NamedTuple):
    """The gradient of one field of `AttentionArgs`, by a finalizer that follows the backward kernels."""

    field: str
    finish: str  # a function of `runtime.finalizers`
    buffers: Callable[[BwdFacts], tuple[Buffer, ...]] = lambda facts: ()
    # Whether a `Problem` with the feature needs the gradient.
    when: Callable[[Any], bool] = lambda problem: True


ADDS, MAPS = "adds", "maps"


class FeatureSpec(NamedTuple):
    """A score feature: one row of `FEATURES`."""

    name: str  # the keyword of `attn`
    present: Callable[[Any], bool]  # whether an AttentionArgs has the feature
    cost: int  # additional registers of a kernel, in the unit of `planning.tiles.common`
    fwd: tuple[Operand, ...] = ()
    bwd: tuple[Operand, ...] = ()
    gradient: Gradient | None = None
    # Its `ScoreFormula` (device/scores): None: it has none; ADDS: it adds a term that does not depend on the score;
    # MAPS: it replaces the score by a function of it, so that dS has a factor.
    formula: str | None = None


# ---- values
# ----------------------------------------------------------------------------------------------------------


def _softcap(args: Any, scale: float) -> float:
    return max(args.softcap, MIN_SOFTCAP, MIN_SOFTCAP * scale)


def _alibi_slopes(args: Any, problem: Any) -> Any:
    """Slopes as (B, H), in fp32; slopes of shape (H) get a batch stride of 0."""
    alibi = args.alibi if args.alibi.element_size() == 4 else args.alibi.float()
    return alibi.expand(problem.batch, problem.heads)


def _sinks(args: Any) -> Any:
    return args.sinks if args.sinks.element_size() == 4 else args.sinks.float()


def _dropout_threshold(args: Any) -> int:
    """The threshold in both halves of a 32-bit word, because kernels compare two random numbers at once."""
    return threshold(args.dropout) * 0x10001


def _dropout_scale(args: Any) -> float:
    return 1 / (1 - args.dropout)


def _rng(args: Any) -> Any:
    return args.rng if args.rng.stride(0) == 1 else args.rng.contiguous()


def _bias(args: Any, problem: Any) -> Any:
    return bias_operand(args.bias, problem.score_shape)


def _captures(args: Any, mods: Any) -> list[Any]:
    return [capture_operand(x) for x in args.captures[: mods.num_captures]]


def capture_operand(x: Any) -> Any:
    """A captured tensor as kernels read it: bools as bytes, fp64 as fp32, rank 0 as rank 1."""
    if 0 in x.shape:
        raise ValueError(f"a captured tensor has shape {tuple(x.shape)}: give it at least one element")
    if x.is_neg():
        # The dispatcher resolves the negative bit of tensor arguments, but not of tensors in optional lists.
        x = x.resolve_neg()
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    elif x.dtype == torch.float64:
        x = x.float()
    return x if x.dim() else x.view(1)


def _scalars(args: Any, mods: Any) -> list[int | float]:
    """The numbers that user mods captured, as ints or floats."""
    return [int(x) if kind == "int" else float(x) for kind, x in zip(mods.scalar_kinds, args.scalars)]


def _dbias(problem: Any, dbias: Any) -> Any:
    """The gradient of the bias as (B, H, rows, columns), with strides of 0 where the bias broadcasts."""
    heads = problem.batch, problem.heads
    return dbias if dbias.shape[:2] == heads else dbias.expand(*heads, -1, -1)


# ---- workspace of gradients
# ----------------------------------------------------------------------------------------------------------


def _dalibi_buffers(facts: BwdFacts) -> tuple[Buffer, ...]:
    """Partial sums of each K/V block and warp. Zeros, because K/V blocks that no query sees write nothing."""
    problem = facts.problem
    parts = facts.num_kv_blocks * facts.tile.dalibi_warps
    return (Buffer("dalibi_partial", (problem.batch_dim, problem.heads, parts), init="zeros"),)


def _dbias_buffers(facts: BwdFacts) -> tuple[Buffer, ...]:
    """The gradient of the bias as the kernel writes it (`planning.bias`), and the sums of its terms."""
    problem = facts.problem
    mods, shape, full_shape = problem.mods, problem.bias.shape, problem.score_shape
    if mods.dbias_accumulates:
        return (Buffer("dbias", shape, mods.dbias_dtype, "zeros"),)
    # Zeros if the kernel skips blocks, because it does not write skipped blocks. If TMA stores the gradient, a producer
    # warp stores zeros in the blocks that a band excludes, or `bwd_sum_dbias` does not read them.
    is_stored = mods.dbias_tma or shape == full_shape
    writes_all = not problem.block_sparse and (mods.dbias_tma or not problem.static.is_bounded)
    dbias = Buffer("dbias", full_shape, mods.dbias_dtype, "empty" if is_stored and writes_all else "zeros")
    return (dbias, Buffer("dbias_sum", shape, mods.dbias_dtype)) if mods.dbias_terms else (dbias,)


def _dcapture_buffers(facts: BwdFacts) -> tuple[Buffer, ...]:
    """The gradients of captured tensors; if deterministic, also a term of each score and the element it is added to."""
    problem = facts.problem
    mods = problem.mods
    buffers = [
        Buffer(f"dcapture_{i}", problem.capture_shapes[i] or (1,), init="zeros", list_name="dcaptures")
        for i in mods.captures_needing_grad
    ]
    if facts.deterministic:
        # Zeros, because the kernel does not write scores of skipped blocks.
        shape = (len(mods.capture_loads), *problem.score_shape)
        buffers.append(Buffer("terms", shape, init="zeros", list_name="dcapture_terms"))
        buffers.append(Buffer("elements", shape, "int32", "zeros", list_name="dcapture_terms"))
    return tuple(buffers)


# ---- the table
# ----------------------------------------------------------------------------------------------------------

SOFTCAP = Operand("softcap", "f32", value=_softcap)
ALIBI_SLOPES = Operand("alibi_slopes", "strided f32", ("sequences", "H"), _alibi_slopes)
# Partial sums of the slopes' gradients: one for each K/V block and warp.
DALIBI_PARTIAL = Operand("dalibi_partial", "compact f32", ("dalibi batch", "H", "dalibi parts"))
SINKS = Operand("sinks", "strided f32", ("H",), _sinks)
DROPOUT = (
    Operand("dropout_threshold", "i32", value=_dropout_threshold),
    Operand("dropout_scale", "f32", value=_dropout_scale),
    Operand("rng", "compact i64", ("2",), _rng),  # (seed, offset)
)
MAX_LOGIT = Operand("max_logit", "compact f32", ("H",))
BIAS = Operand("bias", "bias", ("B", "H", "Sq", "Sk"), _bias)
DBIAS = Operand(
    "dbias",
    "dbias",
    ("B", "H", "dbias rows", "dbias columns"),
    value=_dbias,
    when=lambda key: bool(key.static.mods.dbias_dtype),
)
# Tensors and numbers captured by score_mod and mask_mod; in the backward also by score_mod_bwd.
CAPTURED = (
    Operand("captures", "captures", value=_captures, when=lambda key: key.static.mods.num_captures > 0),
    Operand("scalars", "scalars", value=_scalars, when=lambda key: bool(key.static.mods.scalar_kinds)),
)
DCAPTURES = Operand("dcaptures", "dcaptures", when=lambda key: bool(key.static.mods.captures_needing_grad))
# Deterministic gradients of captured tensors: the term of each score, and the index of the element it is added to.
DCAPTURE_TERMS = Operand(
    "dcapture_terms",
    "dcapture_terms",
    ("loads", "B", "H", "Sq", "Sk"),
    when=lambda key: key.static.deterministic and bool(key.static.mods.captures_needing_grad),
)

FEATURES = (
    FeatureSpec("softcap", lambda args: args.softcap != 0, cost=3, fwd=(SOFTCAP,), bwd=(SOFTCAP,), formula=MAPS),
    FeatureSpec(
        "alibi",
        lambda args: args.alibi is not None,
        cost=2,
        fwd=(ALIBI_SLOPES,),
        bwd=(ALIBI_SLOPES, DALIBI_PARTIAL),
        gradient=Gradient("alibi", "alibi_gradient", _dalibi_buffers),
        formula=ADDS,
    ),
    # The backward kernels need no sink, because the LSE includes it.
    FeatureSpec(
        "sinks", lambda args: args.sinks is not None, cost=1, fwd=(SINKS,), gradient=Gradient("sinks", "sinks_gradient")
    ),
    FeatureSpec("dropout", lambda args: args.dropout != 0, cost=4, fwd=DROPOUT, bwd=DROPOUT),
    FeatureSpec("return_max_logit", lambda args: args.return_max_logit, cost=1, fwd=(MAX_LOGIT,)),
    FeatureSpec(
        "bias",
        lambda args: args.bias is not None,
        cost=4,
        fwd=(BIAS,),
        bwd=(BIAS, DBIAS),
        gradient=Gradient("bias", "bias_gradient", _dbias_buffers, when=lambda problem: problem.mods.bias_needs_grad),
    ),
    FeatureSpec(
        "score_mod",
        lambda args: args.mods.score is not None,
        cost=4,
        fwd=CAPTURED,
        bwd=(*CAPTURED, DCAPTURES, DCAPTURE_TERMS),
        gradient=Gradient(
            "captures",
            "captures_gradient",
            _dcapture_buffers,
            when=lambda problem: bool(problem.mods.captures_needing_grad),
        ),
    ),
    FeatureSpec("mask_mod", lambda args: args.mods.mask is not None, cost=4, fwd=CAPTURED, bwd=CAPTURED),
)
FEATURE = {feature.name: feature for feature in FEATURES}
# The features that `score_mod.mod_spec.ModSpec` describes. A kernel evaluates them in one pass over the scores.
MODS = ("bias", "score_mod", "mask_mod")
# Additional cost of two or more of `MODS` in one call.
SEVERAL_MODS_COST = 8


def features_of(args: Any) -> tuple[str, ...]:
    """The names of a call's score features, in the order of `FEATURES`."""
    return tuple([feature.name for feature in FEATURES if feature.present(args)])


def formulas_of(features: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of the features' formulas, ADDS or MAPS, in the order in which the formulas apply."""
    return tuple([kind for name in features if (kind := FEATURE[name].formula) is not None])


def gradients_of(problem: Any) -> tuple[Gradient, ...]:
    """The gradients of a problem's score features, in the order of `FEATURES`."""
    found = [FEATURE[name].gradient for name in problem.features]
    return tuple([gradient for gradient in found if gradient is not None and gradient.when(problem)])


def backward_features(features: tuple[str, ...]) -> tuple[str, ...]:
    """The features that the main backward kernel implements."""
    return tuple([name for name in features if FEATURE[name].bwd])


def feature_cost(features: tuple[str, ...], block_sparse: bool) -> int:
    """Additional registers of a kernel with these features, in the unit of `planning.tiles.common`."""
    mods = [name for name in features if name in MODS]
    others = sum(FEATURE[name].cost for name in features if name not in MODS)
    if not mods:
        return others + block_sparse
    return others + FEATURE[mods[0]].cost + SEVERAL_MODS_COST * (len(mods) > 1)
