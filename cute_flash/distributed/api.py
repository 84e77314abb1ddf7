"""The public functions of context parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor
from torch.autograd import Function

from cute_flash import ops
from cute_flash.distributed import dtensor, ulysses
from cute_flash.distributed.accumulate import Saved, Scores
from cute_flash.distributed.allgather import AllGather
from cute_flash.distributed.choice import Choice, Shapes, check_method, choose
from cute_flash.distributed.comm import SINGLE, Axes, Axis, Group, broadcast
from cute_flash.distributed.ring import Ring, Schedule, max_steps
from cute_flash.distributed.sharding import Sharding
from cute_flash.distributed.varlen import VarlenAllGather
from cute_flash.errors import UnsupportedError
from cute_flash.runtime.rng import draw_seed
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from cute_flash.spec.describe import describe
from cute_flash.spec.family import current_family
from cute_flash.spec.refusals import refuse
from cute_flash.spec.values import as_bool, as_float, as_int, as_window, check_are_tensors

LAYOUTS = ("bhsd", "bshd")
REMEDY = "context parallelism does not support it; gather the sequence and call cute_flash.attn, or leave it out"


# fmt: off
@overload
def attn(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group | None = ..., method: str = ..., sharding: str | None = ...,
    seqlen: int | None = ...,
    causal: bool = ..., window: tuple[int | None, int | None] = ..., scale: float | None = ...,
    return_lse: Literal[False] = ..., layout: str = ..., deterministic: bool = ..., softcap: float | None = ...,
    alibi: Tensor | None = ..., sinks: Tensor | None = ..., dropout: float | None = ...,
) -> Tensor: ...
@overload
def attn(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group | None = ..., method: str = ..., sharding: str | None = ...,
    seqlen: int | None = ...,
    causal: bool = ..., window: tuple[int | None, int | None] = ..., scale: float | None = ...,
    return_lse: Literal[True], layout: str = ..., deterministic: bool = ..., softcap: float | None = ...,
    alibi: Tensor | None = ..., sinks: Tensor | None = ..., dropout: float | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def attn(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group | None = ..., method: str = ..., sharding: str | None = ...,
    seqlen: int | None = ...,
    causal: bool = ..., window: tuple[int | None, int | None] = ..., scale: float | None = ...,
    return_lse: bool = ..., layout: str = ..., deterministic: bool = ..., softcap: float | None = ...,
    alibi: Tensor | None = ..., sinks: Tensor | None = ..., dropout: float | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on
@dtensor.on_local_tensors
def attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group | None = None,
    method: str = "auto",
    sharding: str | None = None,
    seqlen: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    deterministic: bool = False,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`cute_flash.attn` of a sequence that is sharded over the ranks of a group.

    Every rank passes its shard of q, k and v, and gets its shard of the output. The result is that of `attn` on the
    whole sequence: masks, windows and ALiBi count positions of the sequence, and partial results are summed in fp32.
    All ranks must call it with the same shapes and arguments, in the same order.

    out and lse are differentiable. The gradients of q, k and v are those of the rank's shards. `alibi` and `sinks` are
    the same on every rank, and a rank computes the part of their gradients that comes from its own queries: all-reduce
    these gradients over the group, like those of weights.

    q, k and v may be DTensors that are sharded along the sequence. The results are then DTensors with the same
    placements. Leave `group` out: the ranks are those of the one or two mesh dimensions that shard the sequence. Other
    mesh dimensions may shard batch and heads.

    Args:
        q: The rank's queries, (B, H, S / n, D), or (B, S / n, H, D) with `layout="bshd"`.
        k: The rank's keys, (B, Hkv, S / n, D). H must be a multiple of Hkv.
        v: The rank's values, (B, Hkv, S / n, Dv).
        group: The ranks that share the sequence: a ProcessGroup, a 1-D DeviceMesh, or a 2-D DeviceMesh (ring, ulysses)
            for "usp". Shards are numbered by rank in the group, or row by row in a 2-D mesh. Leave it out for DTensors.
        method: "ring" receives K/V shards of other ranks during the computation. "allgather" gathers K and V first.
            "ulysses" exchanges the sequence for heads: it needs H to be a multiple of n, and one of Hkv and n to be a
            multiple of the other. "usp" is Ulysses along the second dimension of a 2-D mesh and a ring along the first.
            "auto" chooses by the bytes sent; `choose_method` says why.
        sharding: "zigzag" gives a rank one chunk from the start of the sequence and one from its end, so that ranks
            have equal work under a causal mask. "contiguous" is better for windows: fewer ranks exchange keys. The
            default is "zigzag", and "contiguous" for DTensors. A DTensor for "zigzag" must be made of zigzag shards, as
            by `DTensor.from_local(shard(x, group=...), ...)`.
        seqlen: The length of the whole sequence without padding, if `shard` padded it. Rows of the padding have output
            0, LSE -inf and gradients 0.
        causal: Mask the keys after the query's own position.
        window: (left, right), the number of keys before and after its own position that a query sees; None: unbounded.
        scale: Factor of q kᵀ; 1 / sqrt(D) by default.
        return_lse: Also return the log-sum-exp of each row.
        layout: Order of the dimensions: "bhsd" or "bshd".
        deterministic: Compute bitwise reproducible gradients.
        softcap: Replace a score by softcap · tanh(score / softcap); None or 0: no cap.
        alibi: Slopes, (H) or (B, H), as for `cute_flash.attn`. Differentiable.
        sinks: Attention sinks, (H), as for `cute_flash.attn`. Differentiable.
        dropout: As for `cute_flash.attn`. The seed is that of the first rank, and the mask is that of `attn` with this
            seed. On CUDA, chunks of a ring or an all-gather must have a multiple of 32 tokens.
        **others: Other keywords of `cute_flash.attn`, with values that turn them off.

    Returns:
        `out`, or (out, lse), the rank's shards of the results of `cute_flash.attn`.

    Raises:
        ValueError: Arguments are invalid or contradict each other.
        UnsupportedError: The method does not support the arguments.
        RuntimeError: Another rank failed or did not answer before the timeout of the group.

    Examples:
        >>> import torch, torch.distributed as dist, cute_flash.distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q, k, v = (torch.randn(1, 4, 16, 32) for _ in range(3))
        >>> out = cute_flash.distributed.attn(q, k, v, group=dist.group.WORLD, causal=True)
        >>> torch.testing.assert_close(out, cute_flash.attn(q, k, v, causal=True))
        >>> dist.destroy_process_group()
    """
    check_are_tensors(q=q, k=k, v=v)
    refuse("cute_flash.distributed.attn", others, REMEDY)
    return_lse = as_bool("return_lse", return_lse)
    call = _Call.of(q, k, v, group, method, sharding or "zigzag", seqlen, causal, window, layout)
    q, k, v = ops.autocast(*call.to_bhsd(q, k, v))
    args = _args(q, scale, softcap, deterministic)
    args = args._replace(dropout=0.0 if dropout is None else as_float("dropout", dropout))
    # The calls of a ring or an all-gather begin at multiples of the chunk, which `describe` checks for dropout.
    chunk = call.kv_sharding.chunk if args.dropout and call.kv_axis.size > 1 else 0
    describe(q, k, v, args._replace(alibi=alibi, sinks=sinks, dropout_origin=(chunk, chunk, 0, q.shape[1])))
    out, lse = call.run(q, k, v, args, alibi, sinks)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    return (out, lse) if return_lse else out


def attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    group: Group,
    method: str = "auto",
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`cute_flash.attn_varlen` of a varlen batch whose tokens are sharded over the ranks of a group.

    Rank i of n holds the tokens i T / n to (i + 1) T / n - 1 of the concatenated sequences (contiguous sharding), and a
    sequence may cross ranks. Gradients are as for `attn`.

    Args:
        q: The rank's queries, (T / n, H, D).
        k: The rank's keys, (T / n, Hkv, D).
        v: The rank's values, (T / n, Hkv, Dv).
        cu_seqlens: Offsets of the sequences among all T tokens, (B + 1), int32, the same on every rank. Tokens after
            the last offset are padding.
        group: As for `attn`; a 2-D DeviceMesh is not supported.
        method: "auto" or "allgather".
        causal: As for `attn`.
        window: (left, right), as for `attn`. Bounds need `causal`, or a right bound of 0, which is the same mask.
        scale: As for `attn`.
        return_lse: Also return the log-sum-exp, (H, T / n).
        deterministic: As for `attn`.
        softcap: As for `attn`.
        alibi: As for `attn`. It needs `causal`, or a right bound of 0.
        sinks: As for `attn`.
        dropout: None or 0. Dropout is not supported.
        **others: Other keywords of `cute_flash.attn_varlen`, with values that turn them off.

    Returns:
        `out`, (T / n, H, Dv), or (out, lse).

    Raises:
        ValueError: Arguments are invalid or contradict each other.
        UnsupportedError: A window or ALiBi, if a query sees later keys; another method; a 2-D mesh; or dropout.
        RuntimeError: Another rank failed or did not answer before the timeout of the group.

    Examples:
        >>> import torch, torch.distributed as dist, cute_flash.distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, offsets = torch.randn(10, 4, 32), torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> out = cute_flash.distributed.attn_varlen(x, x, x, offsets, group=dist.group.WORLD, causal=True)
        >>> torch.testing.assert_close(out, cute_flash.attn_varlen(x, x, x, offsets, offsets, causal=True))
        >>> dist.destroy_process_group()
    """
    check_are_tensors(q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    refuse("cute_flash.distributed.attn_varlen", others, REMEDY)
    if dropout:
        raise UnsupportedError(
            f"dropout={dropout} of a varlen batch in context parallelism: the kernels number the rows of a sequence "
            "from the start of the shard, so the dropout mask would differ from that of one GPU; leave dropout out, "
            "or pad the sequences to equal lengths and call cute_flash.distributed.attn"
        )
    return_lse = as_bool("return_lse", return_lse)
    if method not in ("auto", "allgather"):
        check_method(method)
        raise UnsupportedError(f"method={method!r} for a varlen batch: only 'allgather' supports it; use 'auto'")
    axes = Axes.of(group)
    if axes.inner.group is not None:
        raise UnsupportedError("a varlen batch with a 2-D DeviceMesh: pass one dimension of it, such as mesh['cp']")
    if any(x.dim() != 3 or x.shape[0] != q.shape[0] for x in (q, k, v)):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"{shapes}: expected (T / n, H, D), with the same number of tokens")
    q, k, v = ops.autocast(q, k, v)
    args = _args(q, scale, softcap, deterministic)
    strategy = VarlenAllGather(axes.outer, cu_seqlens, Band.of(as_bool("causal", causal), as_window(window)))
    describe(q, k, v, args._replace(alibi=alibi, sinks=sinks, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens))
    strategy.check(alibi)
    out, lse = _run(strategy, Scores(args), q, k, v, alibi, sinks)
    return (out, lse) if return_lse else out


def _args(q: Tensor, scale: float | None, softcap: float | None, deterministic: bool) -> AttentionArgs:
    """The arguments that are the same for all kernel calls of a rank."""
    return AttentionArgs(
        scale=(q.shape[-1] or 1) ** -0.5 if scale is None else as_float("scale", scale),
        softcap=0.0 if softcap is None else as_float("softcap", softcap),
        deterministic=as_bool("deterministic", deterministic),
        kernel_family=current_family(),
    )


@torch.compiler.disable
def _run(strategy: Strategy, *arguments: Any) -> tuple[Tensor, Tensor]:
    return ShardedAttention.apply(strategy, *arguments)


def choose_method(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    method: str = "auto",
    sharding: str = "zigzag",
    seqlen: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    layout: str = "bhsd",
) -> Choice:
    """The method that `attn` uses for these tensors, and why. Nothing is computed or sent.

    Args:
        q: As for `attn`.
        k: As for `attn`.
        v: As for `attn`.
        group: As for `attn`.
        method: As for `attn`.
        sharding: As for `attn`.
        seqlen: As for `attn`.
        causal: As for `attn`.
        window: As for `attn`.
        layout: As for `attn`.

    Returns:
        A `Choice` with `method`, `reason` and `sent_bytes`.

    Raises:
        ValueError: Arguments are invalid.
        UnsupportedError: The method does not support the arguments.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from cute_flash.distributed import choose_method
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x = torch.empty(1, 4, 16, 32)
        >>> choose_method(x, x, x, group=dist.group.WORLD).method
        'ring'
        >>> dist.destroy_process_group()
    """
    return _Call.of(q, k, v, group, method, sharding, seqlen, causal, window, layout).choice


# ---- one call
# ----------------------------------------------------------------------------------------------------------


class Strategy(Protocol):
    """How the ranks of one axis compute attention: `Ring`, `AllGather` or `VarlenAllGather`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]: ...

    def backward(self, saved: Saved, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor | None, ...]:
        """dq, dk, dv, dalibi and dsinks; the first three in fp32 (fp64 for fp64)."""
        ...


@dataclass(frozen=True)
class _Call:
    """The checked geometry of one call: method, ranks, sharding and mask."""

    choice: Choice
    axes: Axes
    sharding: Sharding
    band: Band
    layout: str

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: Group | None,
        method: str,
        sharding: str,
        seqlen: int | None,
        causal: Any,
        window: Any,
        layout: str,
    ) -> _Call:
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r}: use one of {', '.join(LAYOUTS)}")
        if any(x.dim() != 4 for x in (q, k, v)):
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
            raise ValueError(f"{shapes}: expected four dimensions each, {layout}")
        heads, rows = (1, 2) if layout == "bhsd" else (2, 1)
        length = q.shape[rows]
        if k.shape[rows] != length or v.shape[rows] != length:
            raise UnsupportedError(
                f"shards of {length} queries, {k.shape[rows]} keys and {v.shape[rows]} values: context parallelism "
                "shards one sequence, so the lengths must agree"
            )
        axes = Axes.of(group)
        seqlen = None if seqlen is None else as_int("seqlen", seqlen)
        placement = Sharding.of_shard(sharding, axes.size, length, seqlen)
        band = Band.of(as_bool("causal", causal), as_window(window))
        shapes_of_rank = Shapes(
            q.shape[0], q.shape[heads], k.shape[heads], length, q.shape[3], v.shape[3], q.element_size()
        )
        return _Call(choose(method, axes, shapes_of_rank, placement, band), axes, placement, band, layout)

    def to_bhsd(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.layout == "bhsd":
            return q, k, v
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @property
    def head_axis(self) -> Axis:
        """The ranks that exchange heads."""
        return self.axes.outer if self.choice.method == "ulysses" else self.axes.inner

    @property
    def kv_axis(self) -> Axis:
        """The ranks that exchange K and V, after the exchange of heads."""
        return SINGLE if self.choice.method == "ulysses" else self.axes.outer

    @property
    def kv_sharding(self) -> Sharding:
        """The sharding after the exchange of heads, in which the shards of `head_axis` form one longer shard."""
        chunk = self.sharding.chunk * self.head_axis.size
        return Sharding(self.sharding.kind, self.kv_axis.size, self.sharding.seqlen, chunk)

    def strategy(self, by_segment: bool, heads: int, heads_kv: int) -> Strategy:
        """The strategy on `kv_axis`, where a rank has these numbers of heads."""
        if self.choice.method == "allgather":
            return AllGather(self.kv_axis, self.kv_sharding, self.band, by_segment)
        return Ring(self.kv_axis, Schedule(self.kv_sharding, self.band, by_segment, max_steps(heads, heads_kv)))

    @torch.compiler.disable
    def run(
        self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, alibi: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute out and lse. Tensors are (B, H, S / n, D)."""
        axis, kind = self.head_axis, self.sharding.kind
        heads, rng = q.shape[1], None
        if args.dropout:
            # All ranks draw a seed, so that their generators keep the same state; the seed of the first rank is used.
            rng = broadcast(draw_seed(q.device), self.axes)
        if axis.size > 1:
            k, v = ulysses.repeat_heads(k, axis.size), ulysses.repeat_heads(v, axis.size)
            q, k, v = ulysses.ExchangeHeads.apply(axis, kind, True, q, k, v)
            alibi, sinks = ulysses.head_slice(alibi, axis), ulysses.head_slice(sinks, axis)
        positions = None
        if alibi is not None:
            positions = self.kv_sharding.positions(self.kv_axis.index, q.device).int()
        first_head = axis.index * q.shape[1] if axis.size > 1 else 0
        strategy = self.strategy(bool(args.dropout), q.shape[1], k.shape[1])
        scores = Scores(args, positions=positions, rng=rng, heads=(first_head, heads))
        out, lse = ShardedAttention.apply(strategy, scores, q, k, v, alibi, sinks)
        if axis.size > 1:
            out, lse = ulysses.ExchangeHeads.apply(axis, kind, False, out, lse)
        return out, lse


class ShardedAttention(Function):
    """The autograd function of attention on one axis of ranks. It saves the rank's q, k, v, out and lse.

    `scores` has no alibi and no sinks: autograd tracks tensors only if they are arguments.
    """

    @staticmethod
    def forward(
        ctx: Any,
        strategy: Strategy,
        scores: Scores,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alibi: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = strategy.forward(q, k, v, replace(scores, alibi=alibi, sinks=sinks))
        ctx.set_materialize_grads(False)
        ctx.strategy, ctx.scores = strategy, scores
        ctx.save_for_backward(q, k, v, out, lse, alibi, sinks)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, alibi, sinks = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        saved = Saved(dout, dlse, q, out, lse)
        scores = replace(ctx.scores, alibi=alibi, alibi_needs_grad=ctx.needs_input_grad[5], sinks=sinks)

        def run() -> tuple[Tensor | None, ...]:
            dq, dk, dv, dalibi, dsinks = ctx.strategy.backward(saved, k, v, scores)
            dalibi = torch.zeros_like(alibi) if alibi is not None and dalibi is None else dalibi
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dalibi, dsinks

        # With create_graph=True, a second backward must raise.
        tensors = dout, dlse, q, k, v, alibi, sinks
        once: Any = ops.NoDoubleBackward
        grads = once.apply(run, *tensors) if torch.is_grad_enabled() else run()
        return None, None, *grads
