"""Calls with functions, a bias and block maps that were checked are not checked again; others still are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from cute_flash.custom import Custom, custom_of
from torch import Tensor

from cute_flash import BlockMask, UnsupportedError, custom, masks
from cute_flash.score_mod.bound import BoundMods
from cute_flash.spec.args import How
from tests.fake_gpu import FakeGpu, normal

B, H, HKV, SQ, SK, D = 2, 4, 2, 20, 40, 16
TABLE = normal(H, SK, seed=4, dtype=torch.float32)
HOW = How(0.3, None, 0)


class Arguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    how: How
    custom: Custom


def looked_up(table: Tensor) -> Callable:
    return lambda score, b, h, q, kv: score + table[h, kv]


def map_of(batch: int = B, heads: int = H, sq: int = SQ, sk: int = SK) -> BlockMask:
    """Which has both dimensions, though all of them are alike."""
    one = BlockMask.of(masks.causal(), (batch, heads, sq, sk))
    return BlockMask.of_status(one.status.expand(batch, heads, -1, -1), 128, 128, sq, sk)


def moved(block_map: BlockMask, device: str) -> BlockMask:
    return BlockMask.of_tensors([x.to(device) for x in block_map.tensors], list(block_map.sizes))


def tensors() -> list[Tensor]:
    return [normal(B, heads, s, D, seed=i) for i, (heads, s) in enumerate(((H, SQ), (HKV, SK), (HKV, SK)))]


def asked(
    how: How = HOW, bias: Tensor | None = None, table: Tensor | None = TABLE, block_map: Any = None
) -> tuple[How, Custom]:
    call = BoundMods.of(None if table is None else looked_up(table), masks.causal(), None)
    return how, custom_of(bias, call, block_map)


def right() -> Arguments:
    bias = normal(1, H, SQ, SK, seed=3, dtype=torch.float32)
    return Arguments(*tensors(), *asked(bias=bias, block_map=map_of()))


def with_custom(**changes: Any) -> Callable[[Arguments], Arguments]:
    return lambda given: given._replace(custom=given.custom._replace(**changes))


def with_bias(change: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Arguments]:
    def changed(given: Arguments) -> Arguments:
        assert given.custom.bias is not None
        return given._replace(custom=given.custom._replace(bias=change(given.custom.bias)))

    return changed


def with_map(block_map: BlockMask) -> Callable[[Arguments], Arguments]:
    return with_custom(block_map=list(block_map.tensors), block_sizes=list(block_map.sizes))


def with_how(**changes: Any) -> Callable[[Arguments], Arguments]:
    return lambda given: given._replace(how=given.how._replace(**changes))


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Arguments]:
    return lambda given: given._replace(**{name: change(getattr(given, name))})


# Each differs in one thing from a call that is right.
WRONG: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "bias of more keys": (with_bias(lambda x: torch.cat([x, x], 3)), "does not broadcast with"),
    "bias of fewer queries": (with_bias(lambda x: x[:, :, 1:]), "does not broadcast with"),
    "bias of two heads": (with_bias(lambda x: x[:, :2]), "does not broadcast with"),
    "bias of three batches": (with_bias(lambda x: x.expand(3, -1, -1, -1)), "does not broadcast with"),
    "bias of ints": (with_bias(lambda x: x.to(torch.int64)), "bias is torch.int64"),
    "bias elsewhere": (with_bias(lambda x: x.to("meta")), "bias is on meta"),
    "map of more queries": (with_map(map_of(sq=SQ + 1)), f"block_map is of {SQ + 1} queries"),
    "map of fewer keys": (with_map(map_of(sk=SK - 10)), f"and {SK - 10} keys"),
    "map of three batches": (with_map(map_of(batch=3)), "block_map has batch=3"),
    "map of two heads": (with_map(map_of(heads=2)), "block_map has heads=2"),
    "map elsewhere": (with_map(moved(map_of(), "meta")), "block_map is on meta"),
    "table elsewhere": (with_custom(tables=[TABLE.to("meta")]), "a captured tensor is on meta"),
    "k of another dtype": (changed("k", Tensor.half), "k is torch.float16 and q is torch.bfloat16"),
    "v of another dtype": (changed("v", Tensor.float), "v is torch.float32 and q is torch.bfloat16"),
    "k elsewhere": (changed("k", lambda x: x.to("meta")), "k is on meta"),
    "k of other lengths": (changed("k", lambda x: x[:, :, 1:]), "all but the last must agree"),
    "q of fewer heads": (changed("q", lambda x: x[:, :3]), "q has 3 heads"),
    "q of fewer queries": (changed("q", lambda x: x[:, :, 1:]), "does not broadcast with"),
    "q of another width": (changed("q", lambda x: x[..., :8]), "batch and head dim must agree"),
    "no number": (with_how(scale=float("nan")), "scale=nan is not finite"),
    "a negative window": (with_how(window_left=-1), "window left=-1 is negative"),
    "a negative softcap": (with_how(softcap=-1.0), "softcap=-1.0"),
    "slopes of two heads": (with_how(alibi=torch.ones(2)), "alibi has shape"),
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "_checked", {})


def run(given: Arguments) -> tuple[Tensor, ...]:
    """The CUDA path, compared with the CPU path."""
    found = custom.fwd_cuda(*given)
    expected = custom._fwd_cpu(*given[:3], *given.how, *given.custom)
    assert all(map(torch.equal, found, expected))
    return found


def backward(given: Arguments, out: Tensor, lse: Tensor) -> Any:
    return custom._bwd_cuda(out, None, *given[:3], out, lse, *given.how, *given.custom)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_after_a_call_that_was_right(gpu: FakeGpu, name: str) -> None:
    change, message = WRONG[name]
    out, lse, _ = run(right())
    assert len(custom._checked) == len(gpu.launches) == 1
    wrong = change(right())
    for attempt in (lambda: custom.fwd_cuda(*wrong), lambda: backward(wrong, out, lse)):
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                attempt()
    assert len(gpu.launches) == 1, "nothing was launched"
    run(right())


def test_what_is_right_is_checked_once(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    run(right())
    monkeypatch.setattr(custom, "checked_problem", None)
    # Other values, of the same shapes.
    given = right()
    custom.fwd_cuda(*given)
    custom.fwd_cuda(*with_bias(torch.neg)(given))
    custom.fwd_cuda(*with_custom(tables=[-TABLE])(given))
    custom.fwd_cuda(*with_map(map_of())(given))
    assert len(custom._checked) == 1 and len(gpu.plans) == 1


@pytest.mark.parametrize(
    "wrong", [torch.ones(H + 1), torch.ones(H, device="meta")], ids=["longer", "elsewhere"]
)
def test_slopes_are_part_of_what_is_known(gpu: FakeGpu, wrong: torch.Tensor) -> None:
    run(with_how(alibi=torch.ones(H))(right()))
    assert custom._checked
    with pytest.raises(ValueError, match="alibi"):
        run(with_how(alibi=wrong)(right()))


def test_packed_sequences_are_always_checked() -> None:
    """A bias and a map are of the dense call that was just made."""
    packed = [normal(10, heads, D, seed=i) for i, heads in enumerate((H, HKV, HKV))]
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    how = HOW._replace(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=6, max_seqlen_k=6)
    for more in ({"bias": torch.ones(1)}, {"block_map": map_of()}):
        with pytest.raises(UnsupportedError, match=f"{next(iter(more))} of packed sequences"):
            custom.fwd_cuda(*packed, *asked(how, **more))


def test_every_call_has_the_problem_of_its_own() -> None:
    """Whatever was known before: two calls that are told apart by their checks are so by what is kept."""
    qkv, bias, other = tensors(), normal(H, SK, dtype=torch.float32), torch.ones(1, 1, 1, 1)
    hows = (HOW, HOW._replace(window_left=3), HOW._replace(softcap=1.0), HOW._replace(max_logit=True))
    tables = (None, TABLE, TABLE.half(), TABLE.clone().requires_grad_())
    calls = [
        asked(how, None if x is None else x[None, :, None], table, block_map)
        for how, x, table, block_map in itertools.product(
            hows, (None, bias, bias.half(), bias.clone().requires_grad_()), tables, (None, map_of())
        )
    ]
    calls += [asked(bias=other), asked(bias=other, block_map=map_of(1, 1)), asked(block_map=map_of(1, 1))]
    expected = [custom.checked_problem(*qkv, *call) for call in calls]
    for _ in range(2):
        assert [custom.known_problem(*qkv, *call) for call in calls] == expected
    assert len(custom._checked) == len(calls)


def test_few_problems_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_flash import operands

    monkeypatch.setattr(operands, "MAX_LAUNCHES", 3)
    q, k, v = tensors()
    for length in range(1, 9):
        custom.known_problem(q[:, :, :length], k, v, *asked())
        assert len(custom._checked) <= 3
