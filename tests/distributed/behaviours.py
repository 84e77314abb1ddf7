"""Functions that run on every rank: refused arguments, helpers, and contracts with autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import cute_flash
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
    with raises(ValueError, "dropout=1.0"):
        cp.attn(x, x, x, group=group, dropout=1.0)
    with raises(ValueError, "group is a NoneType"):
        cp.attn(x, x, x)
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
    for dropout in (None, 0.5):

        def layer(x: torch.Tensor, dropout: float | None = dropout) -> torch.Tensor:
            return cp.attn(x, x, x, group=dist.group.WORLD, method="ring", causal=True, dropout=dropout)

        torch.manual_seed(dist.get_rank())
        (plain,) = torch.autograd.grad(layer(x).square().sum(), x)
        torch.manual_seed(dist.get_rank())
        out = checkpoint(layer, x, use_reentrant=False)
        # The recomputed forward has the seed of the first.
        torch.manual_seed(1000)
        (again,) = torch.autograd.grad(out.square().sum(), x)
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


def varlen_sequences_cross_shards() -> None:
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(8 * n, heads, 8, generator=generator) for heads in (4, 2, 2, 4))
    dlse, slopes, sinks = torch.randn(4, 8 * n, generator=generator), torch.rand(4), torch.rand(4)
    dist.broadcast(slopes, 0)
    dist.broadcast(sinks, 0)
    # A sequence over most ranks, an empty one, and two tokens of padding.
    offsets = torch.tensor([0, 3, 3, 5 * n, 5 * n + 1, 8 * n - 2], dtype=torch.int32)
    dlse[:, -2:] = 0
    tokens = slice(8 * rank, 8 * rank + 8)
    causal = {"causal": True, "alibi": slopes, "sinks": sinks, "softcap": 3.0}
    for keywords in ({}, {"causal": True}, {"sinks": sinks}, causal, {**causal, "window": (4, None)}):
        tensors = [x for x in (keywords.get("alibi"), keywords.get("sinks")) if x is not None]
        results = []
        for part in (slice(None), tokens):
            leaves = [x[part].clone().requires_grad_() for x in (q, k, v)]
            others = [x.detach().requires_grad_() for x in tensors]
            named = dict(zip([name for name in ("alibi", "sinks") if name in keywords], others))
            call = {**keywords, **named, "return_lse": True}
            if part == tokens:
                out, lse = cp.attn_varlen(*leaves, offsets, group=group, **call)
            else:
                out, lse = cute_flash.attn_varlen(*leaves, offsets, offsets, **call)
            total = (out * dout[part]).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse[:, part]).sum()
            grads = torch.autograd.grad(total, [*leaves, *others])
            results.append((out.detach(), lse.detach().T, *grads))
        for i, (full, shard) in enumerate(zip(*results)):
            if i < 5:
                full = full[tokens]
            else:
                dist.all_reduce(shard)
            torch.testing.assert_close(shard, full, rtol=1e-5, atol=2e-5)


def varlen_arguments_are_refused() -> None:
    group, x, offsets = dist.group.WORLD, torch.randn(4, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    with raises(UnsupportedError, "window=(3, None) without causal"):
        cp.attn_varlen(x, x, x, offsets, group=group, window=(3, None))
    with raises(UnsupportedError, "alibi without causal"):
        cp.attn_varlen(x, x, x, offsets, group=group, alibi=torch.ones(2))
    with raises(UnsupportedError, "dropout=0.5 of a varlen batch"):
        cp.attn_varlen(x, x, x, offsets, group=group, dropout=0.5)
    with raises(ValueError, "same number of tokens"):
        cp.attn_varlen(x, x[1:], x[1:], offsets, group=group)
    with raises(UnsupportedError, "method='ring'", "only 'allgather'"):
        cp.attn_varlen(x, x, x, offsets, group=group, method="ring")
    with raises(ValueError, "torch.int32"):
        cp.attn_varlen(x, x, x, offsets.long(), group=group)


def dtensors_give_dtensors() -> None:
    n = dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, heads, 8 * n, 8, generator=generator) for heads in (4, 2, 2, 4))
    slopes = torch.rand(4, generator=generator)
    flat = init_device_mesh("cpu", (n,))
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "cp"))
    for layout, dims in (("bhsd", (0, 1, 2)), ("bshd", (0, 2, 1))):
        batch, heads, sequence = map(Shard, dims)
        tensors = [x if layout == "bhsd" else x.transpose(1, 2).contiguous() for x in (q, k, v, dout)]
        for where, placements in (
            (flat, [sequence]),
            (mesh, [sequence] * 2),
            (mesh, [batch, sequence]),
            (mesh, [heads, sequence]),
        ):
            per_head = [Shard(0) if placement == heads else Replicate() for placement in placements]
            results = []
            for distributes in (False, True):
                leaves = [x.clone() for x in (*tensors[:3], slopes)]
                if distributes:
                    leaves = [distribute_tensor(x, where, placements) for x in leaves[:3]]
                    leaves.append(distribute_tensor(slopes, where, per_head))
                *qkv, alibi = [x.requires_grad_() for x in leaves]
                attn = cp.attn if distributes else cute_flash.attn
                out, lse = attn(*qkv, causal=True, layout=layout, alibi=alibi, return_lse=True)
                found = [out, lse]
                if distributes:
                    assert out.placements == tuple(placements)
                    out, lse = out.full_tensor(), lse.full_tensor()
                found += torch.autograd.grad((out * tensors[3]).sum() + lse.sum(), leaves)
                results.append([x.full_tensor() if distributes else x for x in found])
            for x, y in zip(*results):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-5)


def dtensors_are_checked() -> None:
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    x = torch.randn(2, 2 * n, 4 * n, 8)
    by_sequence, by_head = (distribute_tensor(x, mesh, [Shard(dim)]) for dim in (2, 1))
    with raises(UnsupportedError, "same mesh and placements"):
        cp.attn(by_sequence, by_head, by_head)
    with raises(UnsupportedError, "no mesh dimension shards the sequence"):
        cp.attn(by_head, by_head, by_head)
    with raises(ValueError, "all three must be"):
        cp.attn(by_sequence, x, x)
    with raises(ValueError, "leave it out"):
        cp.attn(by_sequence, by_sequence, by_sequence, group=mesh)
    with raises(UnsupportedError, "equal lengths"):
        uneven = distribute_tensor(x[:, :, 1:], mesh, [Shard(2)])
        cp.attn(uneven, uneven, uneven)
    with raises(UnsupportedError, "placement"):
        wide = distribute_tensor(torch.randn(2, 2, 4, 8 * n), mesh, [Shard(3)])
        cp.attn(wide, wide, wide)
    both = init_device_mesh("cpu", (2, n // 2))
    sharded = distribute_tensor(x, both, [Shard(0), Shard(2)])
    with raises(UnsupportedError, "dropout=0.5", "batch or heads are sharded"):
        cp.attn(sharded, sharded, sharded, dropout=0.5)


ALL = (
    arguments_are_refused, meshes_are_checked, shards_are_collected_in_order, auto_explains_its_choice,
    checkpointing_gives_the_same_gradients, second_derivatives_raise, autocast_casts,
    varlen_sequences_cross_shards, varlen_arguments_are_refused, dtensors_give_dtensors, dtensors_are_checked,
)  # fmt: skip
