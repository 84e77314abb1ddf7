"""`attn` of DTensors: calls `attn` on the local shards, and makes DTensors of the results.

One mesh dimension shards the sequence, or two for "usp". Other mesh dimensions may shard batch and heads; ranks with
different batches or heads do not communicate.
"""

from __future__ import annotations

import math
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cute_flash.distributed.comm import Group
from cute_flash.errors import UnsupportedError
from cute_flash.spec.values import as_bool

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# The dimensions of batch, heads and sequence.
DIMS = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1)}


def on_local_tensors(function: Any) -> Any:
    """Make `function(q, k, v, **keywords)`, for local tensors, take DTensors too."""

    @wraps(function)
    def wrapper(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        if _is_dtensor(q, k, v):
            return _attn(function, q, k, v, **keywords)
        return function(q, k, v, **keywords)

    return wrapper


def _is_dtensor(*tensors: Tensor) -> bool:
    # Without the module there are no DTensors; its import takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def _attn(
    function: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group | None = None,
    sharding: str | None = None,
    layout: str = "bhsd",
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    return_lse: bool = False,
    **keywords: Any,
) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    return_lse = as_bool("return_lse", return_lse)
    if layout not in DIMS:
        raise ValueError(f"layout={layout!r}: use one of {', '.join(DIMS)}")
    qkv = [x for x in (q, k, v) if isinstance(x, DTensor)]
    if len(qkv) < 3:
        raise ValueError("some of q, k and v are DTensors: all three must be, or none")
    if group is not None:
        raise ValueError("group with DTensors: the ranks are those of the DTensors' mesh; leave it out")
    sequence_dims = _check(qkv, layout)
    first, mesh = qkv[0], qkv[0].device_mesh
    others = [i for i, placement in enumerate(first.placements) if i not in sequence_dims and placement.is_shard()]
    if dropout and any(mesh.size(i) > 1 for i in others):
        raise UnsupportedError(
            f"dropout={dropout} of DTensors whose batch or heads are sharded: the mask would differ from that of one "
            "GPU; shard the sequence only"
        )
    out, lse = function(
        *(x.to_local() for x in qkv),
        group=_group(first, sequence_dims),
        sharding=sharding or "contiguous",
        layout=layout,
        alibi=_local(alibi, first),
        sinks=_local(sinks, first),
        dropout=dropout,
        return_lse=True,
        **keywords,
    )
    out = DTensor.from_local(out, mesh, first.placements, run_check=False)
    if not return_lse:
        return out
    # The LSE is (B, H, S) in both layouts.
    place = {dim: i for i, dim in enumerate(DIMS[layout])}
    placements = [Shard(place[p.dim]) if isinstance(p, Shard) else p for p in first.placements]
    return out, DTensor.from_local(lse, mesh, placements, run_check=False)


def _check(qkv: list[DTensor], layout: str) -> tuple[int, ...]:
    """Check meshes and placements, and return the mesh dimensions that shard the sequence."""
    from torch.distributed.tensor import Shard

    first = qkv[0]
    batch, heads, sequence = DIMS[layout]
    for x in qkv:
        if x.device_mesh != first.device_mesh or x.placements != first.placements:
            raise UnsupportedError(
                f"DTensors with placements {', '.join(str(x.placements) for x in qkv)}: q, k and v must have the same "
                "mesh and placements; use redistribute"
            )
        if x.dim() != 4:
            raise ValueError(f"a DTensor of shape {tuple(x.shape)}: expected four dimensions, {layout}")
    for placement in first.placements:
        is_known = placement.is_replicate() or any(placement.is_shard(dim) for dim in (batch, heads, sequence))
        if not is_known:
            raise UnsupportedError(
                f"DTensors with the placement {placement}: use Shard({sequence}) for the sequence, and Shard({batch}) "
                f"(batch), Shard({heads}) (heads) or Replicate() for other mesh dimensions"
            )
    found = tuple(i for i, placement in enumerate(first.placements) if placement.is_shard(sequence))
    if not found:
        raise UnsupportedError(
            f"DTensors with placements {first.placements}: no mesh dimension shards the sequence, dimension "
            f"{sequence}; call cute_flash.attn on the local tensors, x.to_local()"
        )
    for dim in {placement.dim for placement in first.placements if isinstance(placement, Shard)}:
        for x in qkv:
            num = _num_shards(x, dim)
            if x.shape[dim] % num:
                raise UnsupportedError(
                    f"a DTensor of shape {tuple(x.shape)} whose dimension {dim} has {num} shards: they must have equal "
                    "lengths; pad the tensor, and if the dimension is the sequence, pass its length as seqlen="
                )
    return found


def _num_shards(x: DTensor, dim: int) -> int:
    return math.prod(x.device_mesh.size(i) for i, placement in enumerate(x.placements) if placement.is_shard(dim))


def _group(x: DTensor, dims: tuple[int, ...]) -> Group:
    mesh = x.device_mesh
    if len(dims) == mesh.ndim:
        return mesh
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    if mesh.mesh_dim_names is None:
        raise UnsupportedError("two mesh dimensions shard the sequence: pass mesh_dim_names to init_device_mesh")
    return mesh[tuple(mesh.mesh_dim_names[i] for i in dims)]


def _local(x: Tensor | None, q: DTensor) -> Tensor | None:
    """The local slopes or sinks. DTensor sums their gradient over the ranks that have different shards of q."""
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(x, DTensor):
        return x
    pairs = zip(x.placements, q.placements)
    return x.to_local(grad_placements=[Partial() if p.is_replicate() and of_q.is_shard() else p for p, of_q in pairs])
