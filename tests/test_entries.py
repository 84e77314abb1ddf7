"""Every public entry forwards each keyword of `attn`, or refuses it by name. `SharedKeywords` lists the keywords.

A keyword of that list without a value in `VALUES` fails `test_every_keyword_has_a_value`. With a value, it is tested in
every entry: an entry that drops it returns the result of the plain call, which no test accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cute_flash.distributed
from cute_flash import attn, attn_nested, attn_varlen, flex_attention, supports
from cute_flash.integrations import flash_attn, flash_attn_3, transformers
from cute_flash.spec.keywords import SharedKeywords

S, H, D = 16, 2, 8
OFFSETS = torch.tensor([0, S], dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tilted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.1 * kv_idx


# Keyword -> the keywords of a call that uses it. Each changes out or dq, except `deterministic`, which only
# chooses the order of sums, and `batch_invariant`, which the CPU refuses.
VALUES: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "window": dict(window=(3, 2)),
    "attention_chunk": dict(attention_chunk=5),
    "scale": dict(scale=0.7),
    "deterministic": dict(deterministic=True),
    "softcap": dict(softcap=0.5),
    "alibi": dict(alibi=torch.tensor([0.5, 0.25])),
    "sinks": dict(sinks=torch.tensor([2.0, 1.0])),
    "dropout": dict(dropout=0.5),
    "out_dtype": dict(out_dtype=torch.float32),
    "batch_invariant": dict(batch_invariant=True),
    "bias": dict(bias=normal(1, H, S, S, seed=3)),
    "score_mod": dict(score_mod=tilted),
    "mask_mod": dict(mask_mod=lambda b, h, q_idx, kv_idx: q_idx != kv_idx),
    "score_mod_bwd": dict(score_mod=tilted, score_mod_bwd=lambda grad, score, b, h, q_idx, kv_idx: 2.0 * grad),
}
# Entries that take every keyword. `attn` refuses the bias of a NestedTensor.
OWN = ("attn", "attn_nested", "attn_varlen", "supports")


class Wrong:
    """A value that no keyword takes."""


def bshd(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def thd(*tensors: Tensor) -> list[Tensor]:
    return [x[0].transpose(0, 1) for x in tensors]


def jagged(*tensors: Tensor) -> list[Tensor]:
    return [torch.nested.nested_tensor_from_jagged(x, OFFSETS.long()).transpose(1, 2) for x in thd(*tensors)]


def from_thd(out: Tensor) -> Tensor:
    return out.transpose(0, 1)[None]


def from_jagged(out: Tensor) -> Tensor:
    return from_thd(out.transpose(1, 2).values())


def bias_lengths(keywords: dict[str, Any]) -> dict[str, Any]:
    """The lengths that the bias of a varlen batch needs."""
    return dict(max_seqlen_q=S, max_seqlen_k=S) if "bias" in keywords else {}


def supported(*qkv: Tensor, **keywords: Any) -> Tensor:
    """`attn`, after a check that the answer of `supports` is the same."""
    try:
        out = attn(*qkv, **keywords)
    except (ValueError, TypeError) as error:
        reason = supports(*qkv, **keywords).reason.partition(" 0x")[0]
        assert reason and reason in str(error)
        raise
    assert supports(*qkv, **keywords)
    return out


def varlen(function: Callable, *qkv: Tensor, **keywords: Any) -> Tensor:
    """A function of flash-attn or `attn_varlen`, on a batch of one sequence."""
    return from_thd(function(*thd(*qkv), OFFSETS, OFFSETS, **keywords))


def dtensors(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    sharded = (DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in (q, k, v))
    return cute_flash.distributed.attn(*sharded, **keywords).to_local()


def kvcache(module: Any, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    q, k, v = bshd(q.detach(), k, v)
    (out,) = bshd(module.flash_attn_with_kvcache(q, k, v, **keywords))
    return out


ENTRIES: dict[str, Callable[..., Tensor]] = {
    "attn": attn,
    "attn, nested": lambda *qkv, **kw: from_jagged(attn(*jagged(*qkv), **kw)),
    "attn_nested": lambda *qkv, **kw: from_jagged(attn_nested(*jagged(*qkv), **bias_lengths(kw), **kw)),
    "attn_varlen": lambda *qkv, **kw: varlen(attn_varlen, *qkv, **bias_lengths(kw), **kw),
    "supports": supported,
    "flex_attention": flex_attention,
    "distributed.attn": lambda *qkv, **kw: cute_flash.distributed.attn(*qkv, group=dist.group.WORLD, **kw),
    "distributed.attn, DTensor": dtensors,
    "distributed.attn_varlen": lambda q, k, v, **kw: from_thd(
        cute_flash.distributed.attn_varlen(*thd(q, k, v), OFFSETS, group=dist.group.WORLD, **kw)
    ),
    "transformers": lambda *qkv, **kw: transformers.attention(
        SimpleNamespace(is_causal=False),
        *qkv,
        None,
        **kw,  # type: ignore[arg-type]
    )[0].transpose(1, 2),
    **{
        f"{module.__name__.rpartition('.')[2]}.{name}": call
        for module in (flash_attn, flash_attn_3)
        for name, call in {
            "flash_attn_func": lambda *qkv, m=module, **kw: bshd(m.flash_attn_func(*bshd(*qkv), **kw))[0],
            "flash_attn_qkvpacked_func": lambda *qkv, m=module, **kw: bshd(
                m.flash_attn_qkvpacked_func(torch.stack(bshd(*qkv), 2), **kw)
            )[0],
            "flash_attn_varlen_func": lambda *qkv, m=module, **kw: varlen(
                m.flash_attn_varlen_func, *qkv, max_seqlen_q=S, max_seqlen_k=S, **kw
            ),
            "flash_attn_with_kvcache": lambda *qkv, m=module, **kw: kvcache(m, *qkv, **kw),
        }.items()
    },
}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def result(entry: Callable[..., Tensor], dtype: torch.dtype, keywords: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """out, and dq if the entry has gradients."""
    q, k, v = (normal(1, H, S, D, seed=i).to(dtype) for i in range(3))
    q.requires_grad_()
    torch.manual_seed(5)
    out = entry(q, k, v, **keywords)
    return out, torch.autograd.grad(out.square().sum(), q)[0] if out.requires_grad else None


def is_equal(a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None]) -> bool:
    pairs = [(x, y) for x, y in zip(a, b) if x is not None and y is not None]
    return all(x.dtype == y.dtype and torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in pairs)


def test_every_keyword_has_a_value() -> None:
    assert list(VALUES) == list(SharedKeywords.__annotations__)
    q = torch.zeros(1, H, S, D)
    for name, keywords in VALUES.items():
        dtype = torch.bfloat16 if name == "out_dtype" else torch.float32
        without = {other: value for other, value in keywords.items() if other != name}
        if name != "batch_invariant":
            assert supports(q, q, q, **keywords)
            assert is_equal(result(attn, dtype, keywords), result(attn, dtype, without)) == (name == "deterministic")


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", VALUES)
def test_keywords_are_forwarded_or_refused(entry: str, name: str) -> None:
    keywords, dtype = VALUES[name], torch.bfloat16 if name == "out_dtype" else torch.float32
    try:
        found = result(ENTRIES[entry], dtype, keywords)
    except (cute_flash.UnsupportedError, TypeError) as error:
        assert entry not in OWN or name == "batch_invariant", f"{entry} takes {name}: {error}"
        assert any(word in str(error) for word in keywords), error
    else:
        assert is_equal(found, result(attn, dtype, keywords))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", VALUES)
def test_wrong_values_are_noticed(entry: str, name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        result(ENTRIES[entry], torch.float32, {name: Wrong()})


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_new_keyword_is_noticed(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keyword that is added to the list, and nowhere else."""
    monkeypatch.setitem(SharedKeywords.__annotations__, "toy", bool)
    with pytest.raises((ValueError, TypeError), match="toy"):
        result(ENTRIES[entry], torch.float32, {"toy": True})
    if "flash_attn" in entry or entry.startswith(("distributed", "transformers")):
        with pytest.raises(cute_flash.UnsupportedError, match=r"toy=True in .*: "):
            result(ENTRIES[entry], torch.float32, {"toy": True})
        result(ENTRIES[entry], torch.float32, {"toy": None})
