"""Functions that run on every rank: refused arguments, helpers, and contracts with autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import cute_flash.distributed as cp
from cute_flash import UnsupportedError


@contextmanager
def raises(kind: type[Exception], *parts: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert all(part in str(error) for part in parts), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def arguments_are_refused() -> None:
    group, n = dist.group.WORLD, dist.get_world_size()
    x, odd = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 7, 8)
    with raises(UnsupportedError, "dropout=0.1", "dropout mask would differ"):
        cp.attn(x, x, x, group=group, dropout=0.1)
    with raises(ValueError, "zigzag shard of 7 tokens", "shard, which pads"):
        cp.attn(odd, odd, odd, group=group)
    with raises(ValueError, f"at most {8 * n}"):
        cp.attn(x, x, x, group=group, seqlen=8 * n + 1)
    with raises(UnsupportedError, "8 queries, 7 keys"):
        cp.attn(x, odd, odd, group=group)
    with raises(ValueError, "four dimensions"):
        cp.attn(x[0], x[0], x[0], group=group)
    for keywords in ({"method": "star"}, {"sharding": "random"}, {"layout": "hbsd"}):
        with raises(ValueError, "use one of"):
            cp.attn(x, x, x, group=group, **keywords)
    with raises(ValueError, "group is a int"):
        cp.attn(x, x, x, group=3)  # type: ignore[arg-type]
    with raises(UnsupportedError, "2-D DeviceMesh"):
        cp.attn(x, x, x, group=group, method="usp")
    with raises(UnsupportedError, f"3 query heads on {n} ranks"):
        cp.attn(x[:, :3], x[:, :3], x[:, :3], group=group, method="ulysses")
    with raises(UnsupportedError, f"3 K/V heads on {n} ranks"):
        y = torch.randn(1, 3 * n, 8, 8)
        cp.attn(y, y[:, :3], y[:, :3], group=group, method="ulysses")
    with raises(ValueError, "softcap=-1.0"):
        cp.attn(x, x, x, group=group, softcap=-1.0)
    with raises(ValueError, "sinks has shape"):
        cp.attn(x, x, x, group=group, sinks=torch.zeros(3))
    with raises(UnsupportedError, "unshard of a tensor that requires grad"):
        cp.unshard(x.clone().requires_grad_(), group=group)


def meshes_are_checked() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size(), 1))
    x = torch.randn(1, 4, 8, 8)
    with raises(UnsupportedError, "3 dimensions"):
        cp.attn(x, x, x, group=mesh)
    flat = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.testing.assert_close(
        cp.attn(x, x, x, group=flat, causal=True), cp.attn(x, x, x, group=dist.group.WORLD, causal=True)
    )


def shards_are_collected_in_order() -> None:
    group, n = dist.group.WORLD, dist.get_world_size()
    for sharding in ("zigzag", "contiguous"):
        for seqlen in (0, 1, 4 * n, 4 * n + 1):
            x = torch.arange(2 * seqlen).view(2, seqlen)
            shard = cp.shard(x, group=group, sharding=sharding, pad_value=-100)
            assert torch.equal(cp.unshard(shard, group=group, sharding=sharding, seqlen=seqlen), x)
            positions = cp.position_ids(seqlen, group=group, sharding=sharding)
            assert torch.equal(shard[0], torch.where(shard[0] == -100, -100, positions))


def auto_explains_its_choice() -> None:
    group, n = dist.group.WORLD, dist.get_world_size()

    def choice(heads: int, heads_kv: int, **keywords: object) -> cp.Choice:
        q, k = torch.empty(1, heads, 16, 8), torch.empty(1, heads_kv, 16, 8)
        return cp.choose_method(q, k, k, group=group, **keywords)  # type: ignore[arg-type]

    few = choice(8 * n, 1)
    assert few.method == "allgather" and "fewest bytes" in str(few) and set(few.sent_bytes) >= {"ring", "allgather"}
    # No query sees another shard.
    assert choice(3, 3, window=(0, 0)).method == "ring"
    assert choice(n, n).method == ("ulysses" if n > 2 else choice(n, n).method)
    assert choice(n, n, method="ring").reason == "requested"


def checkpointing_gives_the_same_gradients() -> None:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(1, 2, 8, 8, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return cp.attn(x, x, x, group=dist.group.WORLD, method="ring", causal=True)

    (plain,) = torch.autograd.grad(layer(x).square().sum(), x)
    (again,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(plain, again)


def second_derivatives_raise() -> None:
    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    method = "ulysses" if dist.get_world_size() == 2 else "ring"
    out = cp.attn(x, x, x, group=dist.group.WORLD, method=method)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with raises(UnsupportedError, "second derivatives"):
        grad.sum().backward()


def autocast_casts() -> None:
    x = torch.randn(1, 2, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = cp.attn(x, x, x, group=dist.group.WORLD, method="ring", causal=True)
    assert out.dtype == torch.bfloat16


ALL = (
    arguments_are_refused, meshes_are_checked, shards_are_collected_in_order, auto_explains_its_choice,
    checkpointing_gives_the_same_gradients, second_derivatives_raise, autocast_casts,
)  # fmt: skip
