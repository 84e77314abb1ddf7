"""The score features, one row each, and the operands that kernels take.

A *score feature* changes what happens to a score between Q Kᵀ and P V: softcap, ALiBi, sinks, dropout, bias,
score_mod, mask_mod, and max_logit, which reads the scores. A row of `FEATURES` says how a call asks for it,
which operands it adds to the kernels of each direction, what it costs in registers, and which arguments get a
gradient from it. Geometry (varlen, block masks) and policy (deterministic, batch_invariant, fp32 output) change
tiles, grids and workspace instead; they are fields of `Problem`.

A kernel is called with its operands in the order of `planning.registry.KERNELS`, absent ones as None. An
operand's `value` computes what is passed. Its parameters are found by name among the local variables of a
launch (`runtime.launcher`): the call's tensors, `args`, `scale`, `problem`, and the plan's workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cute_flash.spec.dropout import threshold

# The quotient of scale and softcap stays finite. Scores below such a cap are 0 to the softmax.
MIN_SOFTCAP = 1e-30
# Types of a bias that kernels read; others are converted to fp32.
BIAS_DTYPES = ("torch.float16", "torch.bfloat16", "torch.float32")
# From one row of a bias to the next.
MAX_BIAS_ROW_BYTES = (1 << 31) - 1


class Operand(NamedTuple):
    """An argument of a kernel.

    `type` is a scalar ("f32", "i32", "i64"), or a layout and an element type: "rows dtype" (the last dimension
    contiguous, rows aligned to 16 bytes), "compact f32" (contiguous), "strided f32" (any strides), or one of the
    named kinds that `kernels.common.fakes` knows. Equal names in `dims` are one symbolic size per launch.
    """

    name: str
    type: str
    dims: tuple[str, ...] = ()
    value: Callable[..., Any] | None = None


class FeatureSpec(NamedTuple):
    name: str  # the keyword of `attn`
    present: Callable[[Any], bool]  # of AttentionArgs
    cost: int  # registers that a forward kernel needs more, in units of the tile tables (`planning.tiles`)
    fwd: tuple[Operand, ...] = ()
    bwd: tuple[Operand, ...] = ()
    grads: tuple[str, ...] = ()  # arguments of the call that it gives a gradient to


# ---- values
# ----------------------------------------------------------------------------------------------------------


def _softcap(args: Any, scale: float) -> float:
    return max(args.softcap, MIN_SOFTCAP, MIN_SOFTCAP * scale)


def _alibi_slopes(args: Any, problem: Any) -> Any:
    """(B, H): slopes (H) have a batch stride of 0."""
    alibi = args.alibi if args.alibi.element_size() == 4 else args.alibi.float()
    return alibi.expand(problem.batch, problem.heads)


def _sinks(args: Any) -> Any:
    return args.sinks if args.sinks.element_size() == 4 else args.sinks.float()


def _dropout_threshold(args: Any) -> int:
    """In both halves of the word: two scores are compared at once."""
    return threshold(args.dropout) * 0x10001


def _dropout_scale(args: Any) -> float:
    return 1 / (1 - args.dropout)


def _rng(args: Any) -> Any:
    return args.rng.contiguous()


def _bias(args: Any, problem: Any) -> Any:
    """(B, H, Sq, Sk) with strides of 0 where it broadcasts, in a type that kernels read."""
    bias = args.bias
    size = bias.element_size()
    if size > 4:
        bias, size = bias.float(), 4
    if bias.stride(2) * size > MAX_BIAS_ROW_BYTES:
        bias = bias.contiguous()
    whole = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    return bias if bias.shape == whole else bias.expand(whole)


# ---- the table
# ----------------------------------------------------------------------------------------------------------

SOFTCAP = Operand("softcap", "f32", value=_softcap)
ALIBI_SLOPES = Operand("alibi_slopes", "strided f32", ("sequences", "H"), _alibi_slopes)
# Partial sums of the gradient of each slope: one for every K/V block and warp.
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
# Tensors and numbers that score_mod and mask_mod (and score_mod_bwd, in the backward) captured.
CAPTURES, SCALARS = Operand("captures", "captures"), Operand("scalars", "scalars")
DCAPTURES = Operand("dcaptures", "dcaptures")

FEATURES = (
    FeatureSpec("softcap", lambda args: args.softcap != 0, 3, (SOFTCAP,), (SOFTCAP,)),
    FeatureSpec(
        "alibi",
        lambda args: args.alibi is not None,
        2,
        (ALIBI_SLOPES,),
        (ALIBI_SLOPES, DALIBI_PARTIAL),
        ("alibi",),
    ),
    # The backward finds a sink in the LSE; its gradient is a sum over rows after the kernels.
    FeatureSpec("sinks", lambda args: args.sinks is not None, 1, (SINKS,), (), ("sinks",)),
    FeatureSpec("dropout", lambda args: args.dropout != 0, 4, DROPOUT, DROPOUT),
    FeatureSpec("return_max_logit", lambda args: args.return_max_logit, 1, (MAX_LOGIT,)),
    FeatureSpec("bias", lambda args: args.bias is not None, 4, (BIAS,), (BIAS, DBIAS), ("bias",)),
    FeatureSpec(
        "score_mod",
        lambda args: bool(args.score_mod) and args.mods.score is not None,
        4,
        (CAPTURES, SCALARS),
        (CAPTURES, SCALARS, DCAPTURES),
        ("captures",),
    ),
    FeatureSpec(
        "mask_mod",
        lambda args: bool(args.score_mod) and args.mods.mask is not None,
        4,
        (CAPTURES, SCALARS),
        (CAPTURES, SCALARS),
    ),
)
FEATURE = {feature.name: feature for feature in FEATURES}
# Features of user functions and a bias: a kernel evaluates them as one pass over the scores.
MODS = ("bias", "score_mod", "mask_mod")
# What two of them need more together than alone.
SEVERAL_MODS_COST = 8


def features_of(args: Any) -> tuple[str, ...]:
    """The names of the features that a call asks for."""
    return tuple([feature.name for feature in FEATURES if feature.present(args)])


def backward_features(features: tuple[str, ...]) -> tuple[str, ...]:
    """Those that the main kernel of the backward knows of."""
    return tuple([name for name in features if FEATURE[name].bwd])


def feature_cost(features: tuple[str, ...], block_sparse: bool) -> int:
    """Registers that a forward kernel needs more with these features, in units of the tile tables."""
    mods = [name for name in features if name in MODS]
    others = sum(FEATURE[name].cost for name in features if name not in MODS)
    if not mods:
        return others + block_sparse
    return others + FEATURE[mods[0]].cost + SEVERAL_MODS_COST * (len(mods) > 1)
