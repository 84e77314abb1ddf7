"""The torch operators for a bias and for functions that users write, beside all that the general ones take.

    custom_fwd(q, k, v, *How, *Custom) -> (out, lse, max_logit)
    custom_bwd(dout, dlse, q, k, v, out, lse, *How, *Custom) -> (dq, dk, dv, dalibi, dsinks, dbias, dtables)

Mods come as the text of their graphs, which any process can parse, and the values that they captured:
`tables` and `numbers`, of score_mod, of mask_mod and of score_mod_bwd, one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash import backward_custom, custom_cuda, forward, general, operands, ops, packed_cuda
from cute_flash.planning import plan as planning
from cute_flash.reference.score import Score
from cute_flash.reference.user_mods import Sums, Written
from cute_flash.score_mod.block_mask import BlockMask
from cute_flash.score_mod.bound import BoundMods, Graphs, graphs_of
from cute_flash.spec.args import SCHEMA, TENSORS, How
from cute_flash.spec.problem import CPU_DTYPES, Problem, UnsupportedError, check_written_gradients

# The name that `api` uses.
Call = BoundMods


class Custom(NamedTuple):
    """The arguments of both operators after those of `How`."""

    bias: Tensor | None = None  # (B or 1, H or 1, Sq or 1, Sk or 1)
    mods: str = ""  # `Graphs.text`
    tables: list[Tensor] = []  # noqa: RUF012
    numbers: list[float] = []  # noqa: RUF012
    block_map: list[Tensor] = []  # noqa: RUF012
    block_sizes: list[int] = []  # noqa: RUF012
    wants: list[bool] = []  # gradients: of the bias, then of each table  # noqa: RUF012

    @property
    def graphs(self) -> Graphs:
        return graphs_of(self.mods)

    @property
    def map(self) -> BlockMask | None:
        return BlockMask.of_tensors(self.block_map, self.block_sizes) if self.block_map else None

    def written(self, first: int = 0) -> Written:
        parts = self.graphs.split(self.tables, self.numbers)
        return Written(self.graphs, parts, self.bias, self.map, first)

    @property
    def wanted(self) -> tuple[int, ...]:
        """Tables of score_mod that want a gradient."""
        score = self.graphs.score
        found = () if score is None else score.captures
        return tuple(i for i, x in enumerate(found) if x.is_differentiable and self.wants[1 + i])


CUSTOM_SCHEMA = (
    "Tensor? bias, str mods, Tensor[] tables, float[] numbers, Tensor[] block_map, SymInt[] block_sizes, "
    "bool[] wants"
)
NUM_HOW = len(How._fields)
# What follows it has no defaults.
HOW_SCHEMA = SCHEMA.replace("=False", "")
ops.LIBRARY.define(
    f"custom_fwd(Tensor q, Tensor k, Tensor v, {HOW_SCHEMA}, {CUSTOM_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
ops.LIBRARY.define(
    "custom_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{HOW_SCHEMA}, {CUSTOM_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _split(arguments: Any) -> tuple[How, Custom]:
    return How(*arguments[:NUM_HOW]), Custom(*arguments[NUM_HOW:])


# ---- what is asked for
# -----------------------------------------------------------------------------------------------


def four_dimensional(bias: Any) -> Tensor:
    if not isinstance(bias, Tensor):
        raise ValueError(f"bias is a {type(bias).__name__}: give a tensor, to broadcast with (B, H, Sq, Sk)")
    if bias.dim() > 4:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: expected at most four dimensions")
    return bias if bias.dim() == 4 else bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))


def custom_of(bias: Tensor | None, call: BoundMods, block_map: BlockMask | None) -> Custom:
    if block_map is not None and not isinstance(block_map, BlockMask):
        raise ValueError(f"block_map is a {type(block_map).__name__}: give a cute_flash.BlockMask")
    bias = None if bias is None else four_dimensional(bias)
    is_enabled = torch.is_grad_enabled()
    wants = [is_enabled and x is not None and x.requires_grad for x in (bias, *call.captures)]
    maps, sizes = ([], []) if block_map is None else (list(block_map.tensors), list(block_map.sizes))
    return Custom(bias, call.graphs.text, list(call.captures), list(call.scalars), maps, sizes, wants)


def checked_problem(q: Tensor, k: Tensor, v: Tensor, how: How, custom: Custom) -> Problem:
    """Describe a call and refuse what contradicts itself, or what the device has no kernel for."""
    plain = general.checked_problem(q, k, v, how)
    graphs, sizes = custom.graphs, (plain.batch, plain.heads, plain.seqlen_q, plain.seqlen_k)
    if plain.features.varlen:
        for name, given in (("bias", custom.bias is not None), ("block_map", bool(custom.block_map))):
            if given:
                raise UnsupportedError(f"{name} of packed sequences: use score_mod and mask_mod, or attn")
    if custom.bias is not None:
        _check_bias(custom.bias, q, sizes)
    for table in custom.tables:
        if table.device != q.device:
            raise ValueError(
                f"a captured tensor is on {table.device} and q is on {q.device}: they must agree"
            )
    block_map = custom.map
    if block_map is not None:
        block_map.check(*sizes, q.device)
    features = replace(
        plain.features,
        bias=custom.bias is not None,
        score_mod=graphs.score is not None,
        mask_mod=graphs.mask is not None,
        block_map=block_map is not None,
    )
    problem = replace(plain, features=features, mods=custom_cuda.static_of(custom))
    problem.check("cpu" if q.device.type in ("cpu", "meta") else "cuda")
    return problem


# Problems of calls that were checked, by all that checks ask about.
_checked: dict[tuple, Problem] = {}


def known_problem(q: Tensor, k: Tensor, v: Tensor, how: How, custom: Custom) -> Problem:
    """`checked_problem`, looked up where it is known: the host's part of a call is short."""
    described = operands.described
    key = (
        how.described, described(q), described(k), described(v), described(custom.bias), custom.mods,
        *map(described, (*custom.tables, *custom.block_map[:1])), *custom.block_sizes, *custom.wants,
    )  # fmt: skip
    found = _checked.get(key)
    if found is None:
        found = checked_problem(q, k, v, how, custom)
        operands.remember(_checked, key, found)
    return found


def _check_bias(bias: Tensor, q: Tensor, sizes: tuple[int, ...]) -> None:
    if any(own not in (1, size) for own, size in zip(bias.shape, sizes, strict=True)):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: it does not broadcast with {sizes}")
    if bias.device != q.device:
        raise ValueError(f"bias is on {bias.device} and q is on {q.device}: they must agree")
    if str(bias.dtype).removeprefix("torch.") not in CPU_DTYPES:
        raise UnsupportedError(f"bias is {bias.dtype}: use one of {', '.join(CPU_DTYPES)}")


def _score(how: How, problem: Problem, written: Written) -> Score:
    found = how.score(problem.batch, problem.heads) or Score()
    return replace(found, written=written)


# ---- forward
# ---------------------------------------------------------------------------------------------------------


def _fwd_fake(q, k, v, *arguments) -> Any:
    how, custom = _split(arguments)
    checked_problem(q, k, v, how, custom)
    return general._fwd_fake(q, k, v, *how)


def _fwd_cpu(q, k, v, *arguments) -> Any:
    how, custom = _split(arguments)
    problem = checked_problem(q, k, v, how, custom)
    from cute_flash.reference import tiled as reference
    from cute_flash.reference import varlen as packed

    most = general._max_logit(q, how, -torch.inf)
    wanted = most if how.max_logit else None
    if how.cu_seqlens_q is not None:
        return *packed.forward(q, k, v, how, wanted, custom.written()), most
    score, dtype = _score(how, problem, custom.written()), how.out_dtype(q)
    out, lse = reference.forward(q, k, v, problem.band, how.scale, score, wanted, dtype)
    return ops._out_like(q, v, dtype).copy_(out), lse, most


def _fwd_cuda(q, k, v, *arguments) -> Any:
    return fwd_cuda(q, k, v, *_split(arguments))


def fwd_cuda(q: Tensor, k: Tensor, v: Tensor, how: How, custom: Custom) -> Any:
    """What the operator does on CUDA, without the dispatcher."""
    problem = known_problem(q, k, v, how, custom)
    if not problem.features.is_written:
        return general.fwd_cuda(q, k, v, how)
    given = custom_cuda.given(custom, problem)
    problem = custom_cuda.with_mods(problem, given)
    launch = packed_cuda.forward if problem.features.varlen else forward.fwd_cuda
    return launch(q, k, v, how, problem, given)


# ---- backward
# --------------------------------------------------------------------------------------------------------


def _bwd_fake(dout, dlse, q, k, v, out, lse, *arguments) -> Any:
    how, custom = _split(arguments)
    plain = general._bwd_fake(dout, dlse, q, k, v, out, lse, *how)
    return *plain, general._like(custom.bias if custom.wants[0] else None, q), _dtables(custom, q)


def _dtables(custom: Custom, q: Tensor) -> list[Tensor]:
    """Not written; empty where there is none."""
    wanted = custom.wanted
    return [general._like(x if i in wanted else None, q) for i, x in enumerate(custom.tables)]


def _bwd_cpu(dout, dlse, q, k, v, out, lse, *arguments) -> Any:
    from cute_flash.reference import tiled as reference
    from cute_flash.reference import varlen as packed

    how, custom = _split(arguments)
    problem = checked_problem(q, k, v, how, custom)
    written = custom.written()
    sums = Sums(written, custom.wants[0], custom.wanted, reference.accumulator_dtype(q.dtype))
    written = replace(written, sums=sums)
    if how.cu_seqlens_q is not None:
        *grads, dalibi, dsinks = packed.backward((dout, dlse), q, k, v, out, lse, how, written)
    else:
        score = _score(how, problem, written)
        *grads, dalibi, dsinks = reference.backward_with(
            score, (dout, dlse), q, k, v, out, lse, how.band, how.scale
        )
    found = (torch.empty_like(x).copy_(grad) for x, grad in zip((q, k, v), grads, strict=True))
    dbias = general._like(custom.bias if custom.wants[0] else None, q)
    if sums.dbias is not None:
        dbias.copy_(sums.dbias)
    dtables = _dtables(custom, q)
    for i, grad in sums.dtables.items():
        dtables[i].copy_(grad)
    return *found, *general.filled(general._per_head(how, dalibi, dsinks), q), dbias, dtables


def _bwd_cuda(dout, dlse, q, k, v, out, lse, *arguments) -> Any:
    *found, dtables = bwd_cuda(dout, dlse, q, k, v, out, lse, *_split(arguments))
    return *general.filled(found, q), general.filled(dtables, q)


def bwd_cuda(dout, dlse, q, k, v, out, lse, how: How, custom: Custom) -> Any:
    """What the operator does on CUDA, without the dispatcher; None: there is none."""
    problem = known_problem(q, k, v, how, custom)
    check_written_gradients(problem.features)
    if not problem.features.is_written:
        return *general.bwd_cuda(dout, dlse, q, k, v, out, lse, how), None, []
    return backward_custom.bwd_cuda(dout, dlse, q, k, v, out, lse, how, custom, problem)


def keep(ctx, output, q: Tensor, k: Tensor, v: Tensor, how: How, custom: Custom) -> None:
    """What `gradients` needs."""
    out, lse, max_logit = output
    ctx.mark_non_differentiable(max_logit)
    # Gradients on a GPU are computed in threads of autograd's, which do not see it.
    ctx.family = planning.chosen_family()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *how.tensors, custom.bias, *custom.tables, *custom.block_map)
    ctx.how = how.without_tensors
    ctx.custom = custom._replace(bias=None, tables=[], block_map=[])
    ctx.num_tables, ctx.num_lists = len(custom.tables), len(custom.block_map)


def gradients(ctx, dout: Tensor | None, dlse: Tensor | None, _max_logit: None) -> Any:
    """Of q, k, v, slopes, sinks, the bias and the tables; None: there is none."""
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (6 + ctx.num_tables)
    dout = torch.zeros_like(out) if dout is None else dout
    how = ctx.how.with_tensors(tensors[: len(TENSORS)])
    bias, *lists = tensors[len(TENSORS) :]
    tables, block_map = lists[: ctx.num_tables], lists[ctx.num_tables :]
    custom = ctx.custom._replace(bias=bias, tables=tables, block_map=block_map)
    with ops.in_family(ctx.family):
        if ops.is_last_and_direct(dout, dlse, q, k, v, out, lse, *tensors):
            found = bwd_cuda(dout, dlse, q, k, v, out, lse, how, custom)
        else:
            found = custom_bwd(dout, dlse, q, k, v, out, lse, *how, *custom)
    *grads, dalibi, dsinks, dbias, dtables = found
    wanted = custom.wanted
    return (
        *grads,
        None if how.alibi is None else dalibi,
        None if how.sinks is None else dsinks,
        dbias if bias is not None and custom.wants[0] else None,
        *(x if i in wanted else None for i, x in enumerate(dtables)),
    )


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, *arguments = inputs
    keep(ctx, output, q, k, v, *_split(arguments))


def _autograd(ctx, dout: Tensor | None, dlse: Tensor | None, _max_logit: None) -> Any:
    dq, dk, dv, dalibi, dsinks, dbias, *dtables = gradients(ctx, dout, dlse, None)
    # Torch takes an empty list for one of tensors.
    nothing: list[Any] = [None if x else [] for x in (ctx.custom.numbers, ctx.custom.block_sizes)]
    unused = nothing[0], [None] * ctx.num_lists, nothing[1], None
    of_how = general.in_order_of_how(dalibi, dsinks)
    return dq, dk, dv, *of_how, dbias, None, dtables, *unused


ops.LIBRARY.impl("custom_fwd", _fwd_cpu, "CPU")
ops.LIBRARY.impl("custom_fwd", _fwd_cuda, "CUDA")
ops.LIBRARY.impl("custom_bwd", _bwd_cpu, "CPU")
ops.LIBRARY.impl("custom_bwd", _bwd_cuda, "CUDA")
torch.library.register_fake("cute_flash::custom_fwd", _fwd_fake, lib=ops.LIBRARY)
torch.library.register_fake("cute_flash::custom_bwd", _bwd_fake, lib=ops.LIBRARY)
torch.library.register_autograd(
    "cute_flash::custom_fwd", _autograd, setup_context=_setup_context, lib=ops.LIBRARY
)

custom_fwd = torch.ops.cute_flash.custom_fwd.default
custom_bwd = torch.ops.cute_flash.custom_bwd.default
