"""`AttentionArgs`: all arguments of a call besides q, k and v, and their form in the operators' schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cute_flash.spec.band import Band
from cute_flash.spec.dropout import RECT_KEYS, RECT_ROWS

if TYPE_CHECKING:
    from cute_flash.score_mod.graphs import Graphs


_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class _cached:
    """`functools.cached_property` without its lock, which Python below 3.12 takes at the first read."""

    def __init__(self, compute: Any) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: Any, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.compute(instance)
        return value


class _Fields(NamedTuple):
    """The fields of `AttentionArgs`, in the order of `SCHEMA`."""

    # The first four do not influence the plan, so `AttentionArgs.key` omits them.
    scale: float
    scalars: tuple[float, ...] = ()  # numbers captured by score_mod, then by mask_mod, then by score_mod_bwd
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    window_left: int | None = None
    window_right: int | None = None
    attention_chunk: int | None = None  # keys per chunk; a query sees only its chunk
    softcap: float = 0.0  # 0: no softcap
    alibi: Tensor | None = None  # slopes, (H) or (B, H)
    sinks: Tensor | None = None  # (H)
    dropout: float = 0.0
    rng: Tensor | None = None  # (seed, offset) of dropout, int64
    return_max_logit: bool = False
    bias: Tensor | None = None  # (B or 1, H or 1, Sq or 1, Sk or 1)
    mod_graphs: str = ""  # the graphs of score_mod, mask_mod and score_mod_bwd as text (`Graphs.text`); "": no mods
    captures: tuple[Tensor, ...] = ()  # tensors captured by the mods, in the order of `scalars`
    needs_grad: tuple[bool, ...] = ()  # whether the bias, and then each captured tensor, needs a gradient
    block_mask: tuple[Tensor, ...] = ()  # `BlockMask.tensors`
    block_mask_sizes: tuple[int, ...] = ()  # `BlockMask.sizes`
    cu_seqlens_q: Tensor | None = None  # (B + 1), int32: q, k, v are then (T, H, D)
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None  # (B), int32
    out_fp32: bool = False
    deterministic: bool = False  # bitwise reproducible gradients
    batch_invariant: bool = False
    kernel_family: str = ""  # "sm80" or "sm90"; "": the best family for the GPU
    # For a shard of a larger call (context parallelism): the positions of the shard's first row, key and head in that
    # call, and that call's number of heads.
    dropout_origin: tuple[int, ...] = ()


class AttentionArgs(_Fields):
    """All arguments of a call besides q, k and v; the trailing arguments of both operators.

    `api.py` builds it by keyword, and the layers below pass it on unchanged. It is a named tuple because tuples are
    fast to build; the subclass adds cached properties. The kernel family is a field, because threads of autograd and
    compiled graphs do not see the context variable of `use_kernels`.
    """

    def _replace(self, **changes: Any) -> AttentionArgs:
        """`NamedTuple._replace`, in half the time for this many fields."""
        fields = list(self)
        for name, value in changes.items():
            fields[_PLACES[name]] = value
        return tuple.__new__(AttentionArgs, fields)

    def with_features(
        self, alibi: Tensor | None, sinks: Tensor | None, dropout: float, rng: Tensor | None
    ) -> AttentionArgs:
        """`_replace` of these four fields, which are neighbours and still absent; it takes a third of the time."""
        # Adding tuples is faster than unpacking them.
        args = tuple.__new__(AttentionArgs, self[:_ALIBI] + (alibi, sinks, dropout, rng) + self[_RNG + 1 :])  # noqa: RUF005
        # In a third of the time of the cached property; Dynamo does not trace attributes of tuples.
        if not _is_dynamo_compiling():
            args.tensors = self.tensors + tuple([x for x in (alibi, sinks, rng) if x is not None])
        return args

    def with_mods(
        self, bias: Tensor | None, text: str, captures: tuple, scalars: tuple, needs_grad: tuple[bool, ...]
    ) -> AttentionArgs:
        """`_replace` of the fields bias, mod_graphs, captures, scalars and needs_grad, which are still absent."""
        middle = (bias, text, captures, needs_grad)
        args = tuple.__new__(AttentionArgs, (self[0], scalars) + self[2:_BIAS] + middle + self[_BIAS + 4 :])  # noqa: RUF005
        if not _is_dynamo_compiling():
            args.tensors = self.tensors + captures if bias is None else (*self.tensors, bias, *captures)
        return args

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right, self.attention_chunk)

    @_cached
    def mods(self) -> Graphs:
        """The parsed `mod_graphs`."""
        from cute_flash.score_mod.graphs import graphs_of

        return graphs_of(self.mod_graphs)

    @property
    def has_mods(self) -> bool:
        """Whether there is a bias, a score_mod, a mask_mod or a block mask."""
        return self.bias is not None or bool(self.mod_graphs) or bool(self.block_mask)

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors besides q, k, v that may have a gradient, in the order of `attention_bwd`'s `gradients`."""
        return self.alibi, self.sinks, self.bias, *self.captures

    @property
    def bias_needs_grad(self) -> bool:
        return bool(self.needs_grad) and self.needs_grad[0] and self.bias is not None

    @property
    def captures_needing_grad(self) -> tuple[int, ...]:
        """Indices of the captured tensors of score_mod that need a gradient."""
        graph = self.mods.score
        if graph is None or not any(self.needs_grad[1:]):
            return ()
        captures = enumerate(graph.captures)
        return tuple(i for i, x in captures if x.is_differentiable and self.needs_grad[1 + i])

    def out_dtype(self, q: Tensor) -> torch.dtype:
        return torch.float32 if self.out_fp32 else q.dtype

    @_cached
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the call besides q, k and v. `with_features` and `with_mods` append theirs at the end."""
        fields = (
            self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k, *self.block_mask, self.alibi, self.sinks, self.rng,
            self.bias, *self.captures,
        )  # fmt: skip
        return tuple([x for x in fields if x is not None])

    @_cached
    def key(self) -> tuple[Any, ...]:
        """The part of a call's signature that comes from these arguments. Tensors count by shape, dtype and device."""
        tensors = self.tensors
        if not tensors:
            return self[4:]
        bias, origin = self.bias, self.dropout_origin
        key = (
            self.window_left, self.window_right, self.attention_chunk, self.softcap, self.dropout,
            self.return_max_logit, self.mod_graphs, self.needs_grad, self.block_mask_sizes, self.out_fp32,
            self.deterministic, self.batch_invariant, self.kernel_family, self.alibi is None, self.sinks is None,
            self.rng is None, self.seqused_k is None,
            # How kernels load a bias depends on its strides and alignment.
            None if bias is None else (bias.stride(), bias.data_ptr() % 16),
            origin and (origin[0] % RECT_ROWS, origin[1] % RECT_KEYS),
        )  # fmt: skip
        return key, *[(x.shape, x.dtype, x.get_device()) for x in tensors]


SCHEMA = (
    "float scale, float[]? scalars=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "SymInt? window_left=None, SymInt? window_right=None, SymInt? attention_chunk=None, float softcap=0.0, "
    "Tensor? alibi=None, Tensor? sinks=None, float dropout=0.0, Tensor? rng=None, bool return_max_logit=False, "
    'Tensor? bias=None, str mod_graphs="", Tensor[]? captures=None, bool[]? needs_grad=None, '
    "Tensor[]? block_mask=None, SymInt[]? block_mask_sizes=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_k=None, "
    'bool out_fp32=False, bool deterministic=False, bool batch_invariant=False, str kernel_family="", '
    "SymInt[]? dropout_origin=None"
)
_PLACES = {name: i for i, name in enumerate(AttentionArgs._fields)}
# The first of the fields that `with_features` and `with_mods` replace.
_ALIBI, _RNG, _BIAS = _PLACES["alibi"], _PLACES["rng"], _PLACES["bias"]
# Fields that are tuples here and lists in the operators' schema.
LISTS = ("captures", "scalars", "needs_grad", "block_mask", "block_mask_sizes", "dropout_origin")
_LIST_PLACES = tuple(_PLACES[name] for name in LISTS)
# The fields that may have a gradient, in the order of `AttentionArgs.differentiable`. The last one is a tuple.
GRADIENT_FIELDS = ("alibi", "sinks", "bias", "captures")
# Tensors without a gradient that are saved for the backward.
SAVED = ("rng", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")


def needs_grad(bias: Tensor | None, captures: tuple[Tensor, ...]) -> tuple[bool, ...]:
    """The field `needs_grad` of tensors whose gradients are those that autograd asks for."""
    if bias is None and not captures:
        return ()
    return tuple([x is not None and x.requires_grad for x in (bias, *captures)])


def from_schema(values: tuple[Any, ...]) -> AttentionArgs:
    """Build `AttentionArgs` from the trailing arguments of an operator call."""
    fields: list[Any] = list(AttentionArgs(*values))
    for i in _LIST_PLACES:
        fields[i] = tuple(fields[i] or ())
    return AttentionArgs(*fields)


def to_schema(args: AttentionArgs) -> tuple[Any, ...]:
    """Convert to the trailing arguments of an operator call; empty lists become None."""
    values: list[Any] = list(args)
    for i in _LIST_PLACES:
        values[i] = list(values[i]) or None
    return tuple(values)
