"""The score features, one row each, and the operands that kernels take.

A *score feature* changes or reads a score between Q Kᵀ and P V: softcap, ALiBi, sinks, dropout, bias, score_mod,
mask_mod and return_max_logit. A row of `FEATURES` has the condition under which a call has the feature, the operands
that it adds to the forward and backward kernels, and its register cost. Geometry (varlen, block masks) and policy
(deterministic, batch_invariant, fp32 output) have no rows here: they change tiles, grids and workspace.

A kernel is called with its operands in the order of `planning.registry.KERNELS`; absent operands are None.
`Operand.value` is the function that computes an argument. The bound function (`runtime.binder`) calls it with local
variables that have the names of its parameters: the call's tensors, `args`, `scale`, `problem`, and the plan's
workspace and sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cute_flash.spec.dropout import threshold

# Keeps scale / softcap finite. Scores capped at 1e-30 have the same softmax as zeros.
MIN_SOFTCAP = 1e-30
# Dtypes of a bias that kernels read; others are converted to fp32.
BIAS_DTYPES = ("torch.float16", "torch.bfloat16", "torch.float32")
# The largest row stride of a bias: kernels hold it in 32 bits.
MAX_BIAS_ROW_BYTES = (1 << 31) - 1


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


class FeatureSpec(NamedTuple):
    """A score feature: one row of `FEATURES`."""

    name: str  # the keyword of `attn`
    present: Callable[[Any], bool]  # whether an AttentionArgs has the feature
    cost: int  # additional registers of a forward kernel, in the unit of `planning.tiles.common`
    fwd: tuple[Operand, ...] = ()
    bwd: tuple[Operand, ...] = ()


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
    return args.rng.contiguous()


def _bias(args: Any, problem: Any) -> Any:
    """The bias as (B, H, Sq, Sk), with strides of 0 where it broadcasts, in a dtype that kernels read."""
    bias = args.bias
    size = bias.element_size()
    if size > 4:
        bias, size = bias.float(), 4
    if bias.stride(2) * size > MAX_BIAS_ROW_BYTES:
        bias = bias.contiguous()
    shape = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    return bias if bias.shape == shape else bias.expand(shape)


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
DBIAS = Operand("dbias", "dbias", ("B", "H", "dbias rows", "dbias columns"))
# Tensors and numbers captured by score_mod and mask_mod; in the backward also by score_mod_bwd.
CAPTURED = (Operand("captures", "captures"), Operand("scalars", "scalars"))
DCAPTURES = Operand("dcaptures", "dcaptures")
# Deterministic gradients of captured tensors: the term of each score, and the index of the element it is added to.
DCAPTURE_TERMS = Operand("dcapture_terms", "dcapture_terms", ("loads", "B", "H", "Sq", "Sk"))

FEATURES = (
    FeatureSpec("softcap", lambda args: args.softcap != 0, 3, (SOFTCAP,), (SOFTCAP,)),
    FeatureSpec("alibi", lambda args: args.alibi is not None, 2, (ALIBI_SLOPES,), (ALIBI_SLOPES, DALIBI_PARTIAL)),
    # The backward kernels need no sink, because the LSE includes it. A finalizer computes the sinks' gradient.
    FeatureSpec("sinks", lambda args: args.sinks is not None, 1, (SINKS,)),
    FeatureSpec("dropout", lambda args: args.dropout != 0, 4, DROPOUT, DROPOUT),
    FeatureSpec("return_max_logit", lambda args: args.return_max_logit, 1, (MAX_LOGIT,)),
    FeatureSpec("bias", lambda args: args.bias is not None, 4, (BIAS,), (BIAS, DBIAS)),
    FeatureSpec(
        "score_mod", lambda args: args.mods.score is not None, 4, CAPTURED, (*CAPTURED, DCAPTURES, DCAPTURE_TERMS)
    ),
    FeatureSpec("mask_mod", lambda args: args.mods.mask is not None, 4, CAPTURED, CAPTURED),
)
FEATURE = {feature.name: feature for feature in FEATURES}
# The features that `score_mod.mod_spec.ModSpec` describes. A kernel evaluates them in one pass over the scores.
MODS = ("bias", "score_mod", "mask_mod")
# Additional cost of two or more of `MODS` in one call.
SEVERAL_MODS_COST = 8


def features_of(args: Any) -> tuple[str, ...]:
    """The names of a call's score features, in the order of `FEATURES`."""
    return tuple([feature.name for feature in FEATURES if feature.present(args)])


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
