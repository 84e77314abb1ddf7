"""`AttentionArgs`: all arguments of a call besides q, k and v, and their form in the operators' schema."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cute_flash.spec.band import Band
from cute_flash.spec.dropout import RECT_KEYS, RECT_ROWS

if TYPE_CHECKING:
    from cute_flash.score_mod.bound import Graphs


class _Fields(NamedTuple):
    """The fields of `AttentionArgs`, in the order of `SCHEMA`."""

    # The first four do not influence the plan, so `AttentionArgs.key` omits them.
    scale: float
    scalars: tuple[float, ...] = ()  # numbers captured by score_mod, then by mask_mod, then by score_mod_bwd
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    window_left: int | None = None
    window_right: int | None = None
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

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right)

    @cached_property
    def mods(self) -> Graphs:
        """The parsed `mod_graphs`."""
        from cute_flash.score_mod.bound import graphs_of

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

    @cached_property
    def has_tensors(self) -> bool:
        """Whether any field holds a tensor."""
        return not (
            self.alibi is self.sinks is self.rng is self.bias is self.cu_seqlens_q is None
            and not self.captures
            and not self.block_mask
        )

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The part of a call's signature that comes from these arguments. Tensors count by shape, dtype and device."""
        if not self.has_tensors:
            return self[4:]
        alibi, sinks, bias, rng = self.alibi, self.sinks, self.bias, self.rng
        return (
            self.window_left, self.window_right, self.softcap, self.dropout, self.return_max_logit, self.mod_graphs,
            self.needs_grad, self.block_mask_sizes, self.out_fp32, self.deterministic, self.batch_invariant,
            self.kernel_family,
            None if alibi is None else (alibi.shape, alibi.dtype, alibi.device),
            None if sinks is None else (sinks.shape, sinks.dtype, sinks.device),
            # How kernels load a bias depends on its strides and alignment.
            None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device, bias.data_ptr() % 16),
            None if rng is None else (rng.shape, rng.dtype, rng.device),
            self.dropout_origin and (self.dropout_origin[0] % RECT_ROWS, self.dropout_origin[1] % RECT_KEYS),
            None if self.cu_seqlens_q is None else self._offsets_key(),
            *[(x.shape, x.dtype, x.device) for x in self.captures],
            *[(x.shape, x.dtype, x.device) for x in self.block_mask],
        )  # fmt: skip

    def _offsets_key(self) -> tuple[Any, ...]:
        offsets = self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k
        return tuple([None if x is None else (x.shape, x.dtype, x.device) for x in offsets])


SCHEMA = (
    "float scale, float[]? scalars=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "SymInt? window_left=None, SymInt? window_right=None, float softcap=0.0, Tensor? alibi=None, "
    "Tensor? sinks=None, float dropout=0.0, Tensor? rng=None, bool return_max_logit=False, Tensor? bias=None, "
    'str mod_graphs="", Tensor[]? captures=None, bool[]? needs_grad=None, '
    "Tensor[]? block_mask=None, SymInt[]? block_mask_sizes=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_k=None, "
    'bool out_fp32=False, bool deterministic=False, bool batch_invariant=False, str kernel_family="", '
    "SymInt[]? dropout_origin=None"
)
_PLACES = {name: i for i, name in enumerate(AttentionArgs._fields)}
# Fields that are tuples here and lists in the operators' schema.
LISTS = ("captures", "scalars", "needs_grad", "block_mask", "block_mask_sizes", "dropout_origin")
_LIST_PLACES = tuple(_PLACES[name] for name in LISTS)
# The fields that may have a gradient, in the order of `AttentionArgs.differentiable`. The last one is a tuple.
GRADIENT_FIELDS = ("alibi", "sinks", "bias", "captures")
# Tensors without a gradient that are saved for the backward.
SAVED = ("rng", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")


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
