"""Process groups as axes of ranks, and the messages between ranks.

All messages use torch.distributed. On CUDA they run on the stream of the process group, and waiting for one orders the
current stream after it, without a host sync. A message that fails or times out raises an error that names the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cute_flash.errors import UnsupportedError

Group = dist.ProcessGroup | DeviceMesh
# K and V, or their gradients.
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Axis:
    """The ranks of a process group, and the index of this rank; without a group, this rank alone."""

    group: dist.ProcessGroup | None
    size: int
    index: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> Axis:
        return Axis(group, dist.get_world_size(group), dist.get_rank(group))


SINGLE = Axis(None, 1, 0)


@dataclass(frozen=True)
class Axes:
    """The ranks of a call: `outer` exchanges K and V, `inner` exchanges heads. Shard indices are row-major."""

    outer: Axis
    inner: Axis

    @staticmethod
    def of(group: Group | None) -> Axes:
        """The axes of a group: a ProcessGroup or 1-D DeviceMesh is the outer axis, a 2-D DeviceMesh has both."""
        if isinstance(group, DeviceMesh):
            axes = [Axis.of(group.get_group(dim)) for dim in range(group.ndim)]
            if len(axes) not in (1, 2):
                raise UnsupportedError(
                    f"a DeviceMesh of {len(axes)} dimensions: select one for the sequence, such as mesh['cp'], or two "
                    "for method='usp', such as mesh['ring', 'ulysses']"
                )
            return Axes(axes[0], axes[1] if len(axes) == 2 else SINGLE)
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group is a {type(group).__name__}: give a ProcessGroup or a DeviceMesh")
        return Axes(Axis.of(group), SINGLE)

    @property
    def size(self) -> int:
        return self.outer.size * self.inner.size

    @property
    def index(self) -> int:
        """The index of this rank's shard."""
        return self.outer.index * self.inner.size + self.inner.index


# ---- point to point
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """A contiguous tensor to send to a rank of an axis, or a buffer to receive one from it."""

    tensor: Tensor
    peer: int


@dataclass(frozen=True)
class Pending:
    """Messages in flight. `wait` returns the buffers when they are filled; None if nothing is received."""

    requests: Sequence[Any]
    buffers: tuple[Tensor, ...] | None
    # Keeps the sent tensors alive until the messages are complete.
    sent: tuple[Tensor, ...]
    description: str

    def wait(self) -> tuple[Tensor, ...] | None:
        for request in self.requests:
            _checked(request.wait, self.description)
        return self.buffers


NOTHING = Pending((), None, (), "")

_connected: WeakSet[dist.ProcessGroup] = WeakSet()


def connect(axis: Axis, device: torch.device) -> None:
    """Connect the ranks of a group on CUDA, once.

    NCCL sets up a group in its first operation, in which all ranks must take part. Not all ranks take part in each
    exchange of a ring.
    """
    if axis.group is not None and device.type == "cuda" and axis.group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=axis.group)
        _connected.add(axis.group)


def exchange(
    axis: Axis, sends: list[Message], receives: list[Message], buffers: tuple[Tensor, ...], name: str
) -> Pending:
    """Start to send tensors to ranks of the axis and to receive tensors from others, in one batch.

    `buffers`: the tensors that `Pending.wait` returns; the tensors of `receives` are slices of them.
    """
    messages = [dist.P2POp(dist.isend, x.tensor, group=axis.group, group_peer=x.peer) for x in sends]
    messages += [dist.P2POp(dist.irecv, x.tensor, group=axis.group, group_peer=x.peer) for x in receives]
    if not messages:
        return Pending((), buffers if receives else None, (), "")
    parts = [
        f"{verb} {', '.join(str(peer) for peer in dict.fromkeys(x.peer for x in group))}"
        for verb, group in (("sends to rank", sends), ("receives from rank", receives))
        if group
    ]
    description = f"{name}: rank {axis.index} of {axis.size} {' and '.join(parts)}"
    requests = _checked(lambda: dist.batch_isend_irecv(messages), description)
    return Pending(requests, buffers if receives else None, tuple(x.tensor for x in sends), description)


# ---- collectives
# ----------------------------------------------------------------------------------------------------------

# torch 2.13 renames the function.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """The tensors of all ranks of an axis, stacked: (n, *x.shape)."""
    if axis.group is None:
        return x[None]
    x = x.contiguous()
    gathered = x.new_empty((axis.size * x.shape[0], *x.shape[1:]) if x.dim() else (axis.size,))
    _checked(lambda: _all_gather_into(gathered, x, group=axis.group), f"all-gather of rank {axis.index} of {axis.size}")
    return gathered.view(axis.size, *x.shape)


def all_gather_shards(x: Tensor, axes: Axes) -> Tensor:
    """The tensors of all ranks, stacked in the order of shards: gather within each row of the mesh, then over rows."""
    return all_gather(all_gather(x, axes.inner), axes.outer).flatten(0, 1)


def broadcast(x: Tensor, axes: Axes) -> Tensor:
    """Copy the tensor of the first rank to all ranks, in place: over the outer axis, then over the inner axis."""
    for axis in (axes.outer, axes.inner):
        if axis.group is not None:
            send = partial(dist.broadcast, x, group=axis.group, group_src=0)
            _checked(send, f"broadcast of the dropout seed, rank {axis.index} of {axis.size}")
    return x


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Send x[i] to rank i, and return the tensors received, stacked by rank."""
    if axis.group is None:
        return x
    x = x.contiguous()
    received = torch.empty_like(x)
    _checked(
        lambda: dist.all_to_all_single(received, x, group=axis.group), f"all-to-all of rank {axis.index} of {axis.size}"
    )
    return received


def reduce_scatter(x: Tensor, axis: Axis, dtype: torch.dtype) -> Tensor:
    """The sum of x[i] over ranks, on rank i, in `dtype` and in the order of ranks, so that it is reproducible."""
    return all_to_all(x, axis).sum(dim=0, dtype=dtype)


def _checked(communicate: Callable[[], Any], description: str) -> Any:
    try:
        return communicate()
    except RuntimeError as error:
        raise RuntimeError(
            f"cute_flash.distributed, {description}: {error}. Another rank failed, exited, or passed different shapes "
            "or arguments: look for the first error in the logs of the other ranks"
        ) from error
