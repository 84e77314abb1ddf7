"""`attn_decode`: attention of new tokens over a K/V cache, for serving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from cute_flash import ops_decode
from cute_flash.spec.arch import by_name
from cute_flash.spec.decode import DecodeArgs
from cute_flash.spec.foreign import bind_keywords, refuse_foreign, without_foreign
from cute_flash.spec.latent import has_query_tables
from cute_flash.spec.problem import Support
from cute_flash.spec.values import as_bool, as_chunk, as_float, as_int, as_window, check_are_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cute_flash.spec.keywords import DecodeKeywords

KV_LAYOUTS = ("nhd", "hnd")
UNBOUNDED = (None, None)


# fmt: off
@overload
def attn_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor | int,
    return_lse: Literal[False] = ..., **keywords: Unpack[DecodeKeywords],
) -> Tensor: ...
@overload
def attn_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor | int,
    return_lse: Literal[True], **keywords: Unpack[DecodeKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attn_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor | int,
    return_lse: bool = ..., **keywords: Unpack[DecodeKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attn_decode(
    q: Tensor, k_cache: Tensor, *, value_dim: int, cache_seqlens: Tensor | int,
    return_lse: Literal[False] = ..., **keywords: Unpack[DecodeKeywords],
) -> Tensor: ...
@overload
def attn_decode(
    q: Tensor, k_cache: Tensor, *, value_dim: int, cache_seqlens: Tensor | int,
    return_lse: Literal[True], **keywords: Unpack[DecodeKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attn_decode(
    q: Tensor, k_cache: Tensor, *, value_dim: int, cache_seqlens: Tensor | int,
    return_lse: bool = ..., **keywords: Unpack[DecodeKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on
@without_foreign
def attn_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None = None,
    *extra: Any,
    cache_seqlens: Tensor | int,
    value_dim: int | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] = UNBOUNDED,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    kv_layout: Literal["nhd", "hnd"] = "nhd",
    num_splits: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new tokens over a K/V cache: decoding, speculative verification and chunked prefill.

    The call first writes k_new and v_new into the caches, then attends. Sequence b then has
    ``len = cache_seqlens[b] + new tokens`` rows. Query i of T is at position ``len - T + i``, and sees the rows
    ``leftpad[b] <= j < len`` that `causal`, `window` and `attention_chunk` allow. A query that sees no key has output
    0. Its LSE is -inf or, with `sinks`, the sink of its head. docs/decode.md shows each use.

    On CUDA, q is fp16 or bf16, D and Dv are multiples of 8 up to 512 (of 16 with FP8 caches), and only kernels read
    lengths and tables: the host does not synchronize, and a CUDA graph uses the values that the tensors hold when it is
    replayed. Wrong lengths and indices raise a `ValueError` on the CPU, and on CUDA only with `use_checks`. On the CPU,
    q is fp16, bf16, fp32 or fp64. There are no gradients, and autocast has no effect, because the caches have a dtype
    of their own.

    Args:
        q: Queries, (B, T, H, D), or (T, H, D) with `cu_seqlens_q`.
        k_cache: Keys, (B or more, S, Hkv, D), or pages (num_pages, page_size, Hkv, D) with `page_table`; in the dtype
            of q, or float8_e4m3fn; with ``value_dim=512`` also uint8, with rows of 656 bytes in vLLM's format
            ``fp8_ds_mla``: 512 float8_e4m3fn, 4 float32 scales and 64 bfloat16, for D = 576. Any strides, except that
            the last dimension is contiguous and, on CUDA, rows start at multiples of 16 bytes. H must be a multiple of
            Hkv.
        v_cache: Values, in the same form and dtype, with head dim Dv. None with `value_dim`.
        cache_seqlens: (B), int32: the number of rows of each sequence before the append; or one number for all.
        value_dim: Dv, if the values are the first Dv columns of k_cache, which is then the only cache (MLA). Such a
            call has `scale`, and no `v_cache`, `v_new`, `v_scale` and rotary tables.
        page_table: (B, max_pages), int32: row j of sequence b is row ``j % page_size`` of page
            ``page_table[b, j // page_size]``. Pages can have any size. Entries past the end of a sequence are not used.
            With `value_dim` also (B, T, max_pages), a table for each query. A query then sees all rows of its table,
            and a page counts as often as the table names it. Page -1 is skipped. `cache_seqlens` is then (B, T) or a
            number: the rows of a table, including those of skipped pages. `causal` has no effect, and other arguments
            about positions or sequences raise an error.
        cache_batch_idx: (B), int32: the index of sequence b along dimension 0 of the caches, or of `page_table`, which
            then may have any number of rows; None: b.
        leftpad: (B), int32: the number of rows to skip at the start of each sequence.
        k_new: Keys to append, (B, Tn, Hkv, D), or (T, Hkv, D) with `cu_seqlens_q`; in the dtype of q. They are written
            in place after the rows of each sequence, whose caches must not overlap in memory. Tn may differ from T.
        v_new: Values to append, in the same form, with head dim Dv.
        rotary_cos: Cosines of the rotary embedding, (positions, rotary_dim / 2), of any floating-point dtype. k_new is
            rotated by the position of its row. A query is rotated by its own position if `causal`, `window` or
            `attention_chunk` is set, else by ``cache_seqlens[b]``. Dimensions from rotary_dim on are unchanged. Only
            with k_new. On CUDA, rotary_dim is a multiple of 16.
        rotary_sin: Sines, in the shape and dtype of `rotary_cos`.
        rotary_interleaved: Rotate the pairs (0, 1), (2, 3), … instead of (i, i + rotary_dim / 2).
        cu_seqlens_q: (B + 1), int32: offsets of the sequences in q, for different numbers of queries. k_new and v_new
            then have the tokens of q. Tokens after the last offset are padding, with output 0 and LSE -inf.
        causal: Mask the keys after the query's own position.
        window: (left, right), the number of keys before and after its own position that a query sees; None: unbounded.
        attention_chunk: The rows from ``leftpad[b]`` on are divided into chunks of this many rows, and a query sees
            only keys of the chunk of its own position (Llama 4). None or 0: no chunks.
        softcap: Replace a score by softcap · tanh(score / softcap); None or 0: no cap.
        alibi: Slopes, (H) or (B, H), of any floating-point dtype; slope · |distance| is subtracted from a score.
        sinks: Attention sinks, (H), of any floating-point dtype: one more logit, without a value, in each row's
            softmax.
        scale: Factor of q kᵀ; 1 / sqrt(D) by default, and required with `value_dim`, because queries that were
            multiplied into the space of the cache keep the scale of their own head dim.
        k_scale: Scale of an FP8 k_cache, a number or an fp32 tensor, () or (Hkv): a key is its stored value
            times k_scale. k_new is divided by k_scale, rounded and saturated. None: 1. Rows of ``fp8_ds_mla`` have
            scales of their own: k_new is quantized as by vLLM.
        v_scale: The same for v_cache.
        kv_layout: "nhd" as above, or "hnd" for caches (B or more, Hkv, S, D) and pages (num_pages, Hkv, page_size, D).
            k_new and v_new have the same form in both.
        num_splits: A hint: the number of parts into which CUDA kernels split the keys, at most 1024. None, 0 or less:
            the kernel chooses it by the lengths. The CPU path does not split.
        return_lse: Also return the log-sum-exp of each row.
        out: Receives the output, (B, T, H, Dv) or (T, H, Dv), in the dtype of q.

    Returns:
        `out`, or the tuple (out, lse).
            `out` is (B, T, H, Dv) or (T, H, Dv), in the dtype of q. `lse` is the natural logarithm, fp32 (fp64 for
            fp64 inputs), (B, H, T) or (H, T).

    Raises:
        ValueError: Arguments are invalid or contradict each other.
        UnsupportedError: No kernel supports the arguments, or a tensor requires grad while grad mode is on.

    Examples:
        >>> import torch, cute_flash
        >>> q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
        >>> pages = torch.zeros(2, 10, 16, 2, 64)  # K and V, each 10 pages of 16 rows
        >>> table = torch.tensor([[7, 0, 2], [4, 9, 1]], dtype=torch.int32)
        >>> lengths = torch.tensor([20, 3], dtype=torch.int32)
        >>> out = cute_flash.attn_decode(q, *pages, cache_seqlens=lengths, page_table=table, k_new=k, v_new=v)
        >>> out.shape
        torch.Size([2, 1, 8, 64])
        >>> torch.equal(pages[0, 0, 4], k[0, 0])  # row 20 of the first sequence
        True
    """
    if extra or foreign:
        refuse_foreign("attn_decode", extra, foreign)
    if type(return_lse) is not bool:
        return_lse = as_bool("return_lse", return_lse)
    # A tuple takes half the time of keywords. `_canonical` checks the values, and sets the bounds of the window.
    given = DecodeArgs._make((
        cache_seqlens, scale, page_table, cache_batch_idx, leftpad, k_new, v_new, rotary_cos, rotary_sin,
        rotary_interleaved, cu_seqlens_q, None, None, attention_chunk, softcap, alibi, sinks, k_scale, v_scale,
        num_splits, value_dim, out,
    ))  # fmt: skip
    q, k_cache, v_cache, args = _canonical(q, k_cache, v_cache, given, causal, window, kv_layout)
    result, lse = ops_decode.decode(q, k_cache, v_cache, args, return_lse)
    return (result, lse) if return_lse else result


def decode_supports(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None = None, *, gpu: str | None = None, **keywords: Any
) -> Support:
    """Check whether `attn_decode` supports these tensors and keywords.

    No attention kernel is launched, and lengths and tables are not read.

    Args:
        q: Queries, as for `attn_decode`.
        k_cache: Keys, as for `attn_decode`.
        v_cache: Values, as for `attn_decode`.
        gpu: Answer for tensors on this GPU, as for `supports`.
        **keywords: Keywords of `attn_decode`.

    Returns:
        A `Support`, which is true if the call is supported, and whose `reason` is the error message if not.

    Examples:
        >>> import torch, cute_flash
        >>> q, cache = torch.empty(2, 1, 8, 64), torch.empty(2, 100, 2, 64)
        >>> bool(cute_flash.decode_supports(q, cache, cache, cache_seqlens=10))
        True
        >>> cute_flash.decode_supports(q, cache, cache, cache_seqlens=10, softcap=-1.0).reason
        'softcap=-1.0: use a positive number, or None for no cap'
    """
    try:
        arch = None if gpu is None else by_name(str(gpu))
        q, k_cache, v_cache, args = bind(q, k_cache, v_cache, **keywords)
        ops_decode.check(q, k_cache, v_cache, args, arch)
    except (TypeError, ValueError) as error:
        return Support(False, str(error))
    return Support(True)


def bind(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None = None, **keywords: Any
) -> tuple[Tensor, Tensor, Tensor | None, DecodeArgs]:
    """The arguments of a call of `attn_decode` in the form that the operator takes."""
    arguments = dict(bind_keywords(attn_decode, q, k_cache, v_cache, **keywords).arguments)
    as_bool("return_lse", arguments.pop("return_lse"))
    others = {name: arguments.pop(name) for name in ("q", "k_cache", "v_cache", "causal", "window", "kv_layout")}
    return _canonical(given=DecodeArgs(**arguments), **others)


def _canonical(
    q: Any, k_cache: Any, v_cache: Any, given: DecodeArgs, causal: Any, window: Any, kv_layout: Any
) -> tuple[Tensor, Tensor, Tensor | None, DecodeArgs]:
    """q and views of the caches in the shapes of `spec.decode`, and the other arguments.

    The fields of `given` have the values of the keywords, unchecked.
    """
    (
        cache_seqlens, scale, page_table, cache_batch_idx, leftpad, k_new, v_new, rotary_cos, rotary_sin,
        rotary_interleaved, cu_seqlens_q, _left, _right, attention_chunk, softcap, alibi, sinks, k_scale, v_scale,
        num_splits, value_dim, out,
    ) = given  # fmt: skip
    if not (isinstance(q, Tensor) and isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)):
        if type(v_cache) is int:
            raise ValueError(f"v_cache={v_cache} is a number: give a torch.Tensor, or write value_dim={v_cache}")
        check_are_tensors(q=q, k_cache=k_cache, **{} if v_cache is None else {"v_cache": v_cache})
    for x in (
        page_table, cache_batch_idx, leftpad, k_new, v_new, rotary_cos, rotary_sin, cu_seqlens_q, alibi, sinks, out
    ):  # fmt: skip
        if x is not None and not isinstance(x, Tensor):
            _refuse_value(
                x, page_table=page_table, cache_batch_idx=cache_batch_idx, leftpad=leftpad, k_new=k_new, v_new=v_new,
                rotary_cos=rotary_cos, rotary_sin=rotary_sin, cu_seqlens_q=cu_seqlens_q, alibi=alibi, sinks=sinks,
                out=out,
            )  # fmt: skip
    if kv_layout != "nhd":
        k_cache, v_cache = _to_nhd(k_cache, v_cache, kv_layout)
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = _seqlens_tensor(q, given)
    q = _with_contiguous_rows(q)
    if k_new is not None:
        k_new = _with_contiguous_rows(k_new)
    if v_new is not None:
        v_new = _with_contiguous_rows(v_new)
    if k_scale is not None:
        k_scale = _scale_tensor("k_scale", k_scale, q)
    if v_scale is not None:
        v_scale = _scale_tensor("v_scale", v_scale, q)
    if value_dim is not None:
        value_dim = as_int("value_dim", value_dim)
    if scale is None:
        if value_dim is not None:
            raise ValueError(
                f"value_dim={value_dim} without scale: give that of the head dim before absorption, such as 192**-0.5"
            )
        scale = (q.shape[-1] or 1) ** -0.5 if q.dim() else 1.0
    elif type(scale) is not float:
        scale = as_float("scale", scale)
    if softcap is not None:
        softcap = as_float("softcap", softcap) or None
    left, right = UNBOUNDED if window == UNBOUNDED else as_window(window)
    if as_bool("causal", causal):
        right = 0
    if attention_chunk is not None:
        attention_chunk = as_chunk(attention_chunk)
    rotary_interleaved = as_bool("rotary_interleaved", rotary_interleaved)
    if num_splits is not None:
        num_splits = as_int("num_splits", num_splits)
        num_splits = num_splits if num_splits > 0 else None
    args = DecodeArgs(
        cache_seqlens, scale, page_table, cache_batch_idx, leftpad, k_new, v_new, rotary_cos, rotary_sin,
        rotary_interleaved, cu_seqlens_q, left, right, attention_chunk, softcap, alibi, sinks, k_scale, v_scale,
        num_splits, value_dim, out,
    )  # fmt: skip
    return q, k_cache, v_cache, args


def _refuse_value(value: Any, **arguments: Any) -> None:
    """Raise `ValueError` for an argument that is not a tensor."""
    check_are_tensors(**{name: x for name, x in arguments.items() if x is value})


def _to_nhd(k_cache: Tensor, v_cache: Tensor | None, kv_layout: Any) -> tuple[Tensor, Tensor | None]:
    """Views of the caches as (…, rows, Hkv, D)."""
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(f"kv_layout={kv_layout!r}: use one of {', '.join(KV_LAYOUTS)}")
    # `describe_decode` raises an error for caches that are not 4-D.
    if kv_layout == "hnd" and k_cache.dim() == 4 and (v_cache is None or v_cache.dim() == 4):
        return k_cache.transpose(1, 2), None if v_cache is None else v_cache.transpose(1, 2)
    return k_cache, v_cache


def _seqlens_tensor(q: Tensor, given: DecodeArgs) -> Tensor:
    """One length for all sequences as a tensor (B), or (B, T) with a page table for each query."""
    seqlen = as_int("cache_seqlens", given.cache_seqlens, "give a whole number, or an int32 tensor of shape (B)")
    # `describe_decode` raises an error if q or cu_seqlens_q has the wrong number of dimensions.
    if given.cu_seqlens_q is not None:
        shape: tuple[int, ...] = (max(given.cu_seqlens_q.numel() - 1, 0),)
    else:
        shape = q.shape[: 2 if has_query_tables(given) else 1]
    return torch.full(shape, seqlen, dtype=torch.int32, device=q.device)


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is not contiguous."""
    if x.layout != torch.strided:
        return x  # the operator raises the error
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def _scale_tensor(name: str, value: Any, q: Tensor) -> Tensor:
    """The scale of an FP8 cache as a tensor, () or (Hkv); a tensor (1) becomes ()."""
    if isinstance(value, Tensor):
        return value.reshape(()) if value.shape == (1,) else value
    return torch.full((), as_float(name, value), dtype=torch.float32, device=q.device)
