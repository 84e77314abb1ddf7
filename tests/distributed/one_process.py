"""All ranks of a ring in one process: each rank's calls on the shards that it would receive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cute_flash.distributed.accumulate import Gradients, Output, Saved, Scores
from cute_flash.distributed.ring import Schedule, heads_first, keys_first
from cute_flash.distributed.sharding import join, split
from cute_flash.reference.dense import dense
from cute_flash.spec.args import AttentionArgs


def ring(schedule: Schedule, tensors: list[Tensor], scores: Scores) -> list[Tensor]:
    """out, dq, dk and dv of the full sequence, from q, k, v and dout. Positions are added to `scores` for each rank."""
    n, kind = schedule.sharding.num_shards, schedule.sharding.kind
    q, k, v, dout = (split(x, n, 2, kind).unbind(0) for x in tensors)
    outs, dqs = [], []
    sums: list[Any] = [None] * n
    for rank in range(n):
        positions = schedule.sharding.positions(rank, q[0].device).int()
        of_rank = Scores(scores.args, scores.alibi, False, positions, scores.rng, scores.heads)
        output = Output(q[rank], v[rank], schedule.num_calls(rank, schedule.groups))
        for kv, calls, key_positions, _ in arrived(schedule, schedule.groups, rank, k, v):
            for call in calls:
                output.add(kv, call, of_rank, key_positions)
        out, lse = output.result(None, q[rank].shape[2])
        gradients = Gradients(Saved(dout[rank], None, q[rank], out, lse), of_rank)
        for kv, calls, key_positions, parts in arrived(schedule, schedule.backward_groups, rank, k, v):
            shares = gradients.add(kv, calls, key_positions)
            if parts is None:
                sums[rank] = gradients.sum_keys(kv, sums[rank], shares)
            for part in parts or ():
                share = gradients.shares_of(kv, shares, part.place, gradients.dtype)
                own = k[part.shard], v[part.shard]
                sums[part.shard] = gradients.sum_keys(own, sums[part.shard], [(part.keys, *share)])
        outs.append(out)
        dqs.append(gradients.dq)
    found = outs, dqs, [x[0] for x in sums], [x[1] for x in sums]
    return [join(torch.stack(list(shards)), 2, kind) for shards in found]


def arrived(schedule: Schedule, groups: tuple[range, ...], rank: int, k: Any, v: Any) -> Iterator[Any]:
    """(k, v), calls, key positions and parts of each group of a rank. The own shard has no parts."""
    device = k[rank].device
    yield (k[rank], v[rank]), schedule.calls(rank, rank), schedule.sharding.positions(rank, device).int(), None
    for steps in groups[1:]:
        group = schedule.group(rank, steps)
        if group.parts:
            pieces = [[x[part.shard][:, :, slice(*part.keys)] for part in group.parts] for x in (k, v)]
            kv = tuple(heads_first(keys_first(torch.cat(x, dim=2))) for x in pieces)
            places = [schedule.sharding.positions(x.shard, device)[slice(*x.keys)] for x in group.parts]
            yield kv, group.calls, torch.cat(places).int(), group.parts


def by_one_call(tensors: list[Tensor], args: AttentionArgs) -> list[Tensor]:
    """out, dq, dk and dv of the full sequence by the oracle, from q, k, v and dout."""
    *qkv, dout = (x.to(torch.float64) for x in tensors)
    leaves = [x.requires_grad_() for x in qkv]
    out, _ = dense(*leaves, args=args)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
