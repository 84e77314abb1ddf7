"""The positions of a sequence that each rank holds, and functions that shard and unshard tensors.

For n ranks, "contiguous" splits the sequence into n chunks, and rank i holds chunk i. "zigzag" splits it into 2n
chunks, and rank i holds the chunks i and 2n - 1 - i, so that all ranks have equal work under a causal mask. Chunks have
equal lengths: if the number of chunks does not divide the length of a sequence, it is padded at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cute_flash.distributed.comm import Axes, Group, all_gather_shards
from cute_flash.errors import UnsupportedError

SHARDINGS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens: positions `start` to `stop` - 1 of the sequence, rows `begin` to `end` - 1 of a shard."""

    begin: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.begin + self.length

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Sharding:
    """A sequence of `seqlen` tokens on `num_shards` ranks.

    Attributes:
        kind: "zigzag" or "contiguous".
        num_shards: The number of ranks that hold a part of the sequence.
        seqlen: The number of tokens without padding.
        chunk: The number of tokens of a chunk, with padding.
    """

    kind: str
    num_shards: int
    seqlen: int
    chunk: int

    @staticmethod
    def of(kind: str, num_shards: int, seqlen: int) -> Sharding:
        """The sharding with the shortest chunks that hold the sequence."""
        return Sharding(kind, num_shards, seqlen, -(-seqlen // (num_shards * _chunks_per_shard(kind))))

    @staticmethod
    def of_shard(kind: str, num_shards: int, shard_length: int, seqlen: int | None) -> Sharding:
        """The sharding of a tensor with `shard_length` rows on each rank; `seqlen` is the total without padding."""
        per_shard = _chunks_per_shard(kind)
        if shard_length % per_shard:
            raise ValueError(
                f"a zigzag shard of {shard_length} tokens: it has two equal chunks, so its length must be even; "
                "use cute_flash.distributed.shard, which pads the sequence, and pass seqlen="
            )
        total = num_shards * shard_length
        if seqlen is None:
            seqlen = total
        if not 0 <= seqlen <= total:
            raise ValueError(
                f"seqlen={seqlen} with shards of {shard_length} tokens on {num_shards} ranks: give the length without "
                f"padding, at most {total}"
            )
        return Sharding(kind, num_shards, seqlen, shard_length // per_shard)

    @property
    def shard_length(self) -> int:
        return self.chunk * _chunks_per_shard(self.kind)

    def chunks(self, shard: int) -> tuple[int, ...]:
        """The indices of the chunks of a shard, in the order of its rows."""
        return (shard,) if self.kind == "contiguous" else (shard, 2 * self.num_shards - 1 - shard)

    def segments(self, shard: int) -> tuple[Segment, ...]:
        """The segments of a shard without padding, in the order of positions. Adjacent chunks form one segment."""
        return _segments(self, shard)

    def positions(self, shard: int, device: torch.device | str | None = None) -> Tensor:
        """The position of each row of a shard, (shard_length), int64; 0 for padding."""
        rows = [torch.arange(i * self.chunk, (i + 1) * self.chunk, device=device) for i in self.chunks(shard)]
        positions = torch.cat(rows)
        return positions.masked_fill(positions >= self.seqlen, 0)


@lru_cache(maxsize=4096)
def _segments(sharding: Sharding, shard: int) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for place, index in enumerate(sharding.chunks(shard)):
        begin, start = place * sharding.chunk, index * sharding.chunk
        length = min(sharding.chunk, sharding.seqlen - start)
        if length <= 0:
            continue
        if segments and (segments[-1].end, segments[-1].stop) == (begin, start):
            last = segments.pop()
            begin, start, length = last.begin, last.start, last.length + length
        segments.append(Segment(begin, start, length))
    return tuple(segments)


def _chunks_per_shard(kind: str) -> int:
    if kind not in SHARDINGS:
        raise ValueError(f"sharding={kind!r}: use one of {', '.join(SHARDINGS)}")
    return 2 if kind == "zigzag" else 1


# ---- tensors
# ----------------------------------------------------------------------------------------------------------


def join(shards: Tensor, dim: int, kind: str) -> Tensor:
    """Concatenate stacked shards, (n, ...), along `dim` of a shard, in the order of positions."""
    parts = shards.unbind(0)
    if kind == "contiguous":
        return torch.cat(parts, dim)
    halves = [x.chunk(2, dim) if x.shape[dim] else (x, x) for x in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)


def split(x: Tensor, num_shards: int, dim: int, kind: str) -> Tensor:
    """The inverse of `join`: the shards of a tensor, stacked."""
    if kind == "contiguous":
        return torch.stack(x.tensor_split(num_shards, dim))
    chunks = x.tensor_split(2 * num_shards, dim)
    return torch.stack([torch.cat((chunks[i], chunks[-1 - i]), dim) for i in range(num_shards)])


def shard(x: Tensor, *, group: Group, dim: int = 1, sharding: str = "zigzag", pad_value: float = 0) -> Tensor:
    """The rows of a tensor that this rank holds.

    Every rank passes the same tensor. If the number of chunks does not divide its length, it is padded at the end, and
    the length without padding must be passed to `attn` and `unshard` as `seqlen`. Nothing is sent.

    Args:
        x: The tensor of the whole sequence.
        group: A ProcessGroup or a DeviceMesh, as for `attn`.
        dim: The dimension of the sequence.
        sharding: "zigzag" or "contiguous", as for `attn`.
        pad_value: The value of the padding, such as the ignored label of a loss.

    Returns:
        The shard, a copy with the dimensions of x. Gradients flow to x.

    Raises:
        ValueError: The sharding is unknown.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from cute_flash.distributed import shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shard(torch.arange(4)[None], group=dist.group.WORLD)
        tensor([[0, 1, 2, 3]])
        >>> dist.destroy_process_group()
    """
    axes = Axes.of(group)
    placement = Sharding.of(sharding, axes.size, x.shape[dim])
    parts = [x.narrow(dim, s.start, s.length) for s in placement.segments(axes.index)]
    shape = list(x.shape)
    shape[dim] = placement.shard_length - sum(part.shape[dim] for part in parts)
    if shape[dim]:
        # Padding is at the end of the sequence, and so at the end of a shard.
        parts.append(x.new_full(shape, pad_value))
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


def unshard(x: Tensor, *, group: Group, dim: int = 1, sharding: str = "zigzag", seqlen: int | None = None) -> Tensor:
    """Collect the shards of all ranks into the tensor of the whole sequence, on every rank.

    Args:
        x: The shard of this rank, of the same shape on all ranks.
        group: A ProcessGroup or a DeviceMesh, as for `attn`.
        dim: The dimension of the sequence.
        sharding: "zigzag" or "contiguous", as for `attn`.
        seqlen: The length of the sequence without padding; by default there is no padding.

    Returns:
        The tensor in the order of positions, without padding.

    Raises:
        ValueError: The sharding is unknown, or `seqlen` does not fit.
        UnsupportedError: x requires a gradient, which `unshard` does not compute.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from cute_flash.distributed import shard, unshard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> unshard(shard(torch.arange(4)[None], group=dist.group.WORLD), group=dist.group.WORLD)
        tensor([[0, 1, 2, 3]])
        >>> dist.destroy_process_group()
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "unshard of a tensor that requires grad: compute the loss of each shard instead, or pass x.detach()"
        )
    axes = Axes.of(group)
    dim %= x.dim()
    placement = Sharding.of_shard(sharding, axes.size, x.shape[dim], seqlen)
    return join(all_gather_shards(x, axes), dim, sharding).narrow(dim, 0, placement.seqlen)


def position_ids(
    seqlen: int, *, group: Group, sharding: str = "zigzag", device: torch.device | str | None = None
) -> Tensor:
    """The positions of the tokens that `shard` gives this rank, for rotary or learned position embeddings.

    Args:
        seqlen: The length of the sequence without padding.
        group: A ProcessGroup or a DeviceMesh, as for `attn`.
        sharding: "zigzag" or "contiguous", as for `attn`.
        device: The device of the result.

    Returns:
        Positions, int64, one for each row of the shard; 0 for padding.

    Raises:
        ValueError: The sharding is unknown.

    Examples:
        >>> import torch.distributed as dist
        >>> from cute_flash.distributed import position_ids
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> position_ids(3, group=dist.group.WORLD)  # padded to two chunks of two tokens
        tensor([0, 1, 2, 0])
        >>> dist.destroy_process_group()
    """
    axes = Axes.of(group)
    return Sharding.of(sharding, axes.size, seqlen).positions(axes.index, device)
