"""Cases of context parallelism: each rank compares its shards with the call on the full sequence."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cute_flash
import cute_flash.distributed as cp

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One call on the full sequence, and how it is distributed."""

    method: str = "ring"
    sharding: str = "zigzag"
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    seqlen: int = 64
    batch: int = 1
    heads: int = 4
    heads_kv: int = 4
    head_dim: int = 8
    head_dim_v: int = 8
    dtype: torch.dtype = torch.float32
    layout: str = "bhsd"
    softcap: float | None = None
    alibi: int = 0  # dimensions of the slopes
    sinks: bool = False
    uses_lse: bool = True
    dropout: float | None = None
    inner: int = 2  # second dimension of the mesh of "usp"

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name), field.default) for field in fields(self)[2:]]
        changed = [f"{name}={value}".replace(" ", "") for name, value, default in values if value != default]
        return "-".join([self.method, self.sharding, *changed])

    @property
    def mask(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window}

    def inputs(self) -> dict[str, Tensor]:
        """q, k, v, the slopes and sinks, and the gradients of the results; the same on every rank."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        rows = self.batch, self.heads, self.seqlen
        keys = self.batch, self.heads_kv, self.seqlen
        tensors = {
            "q": random(*rows, self.head_dim),
            "k": random(*keys, self.head_dim),
            "v": random(*keys, self.head_dim_v),
            "dout": random(*rows, self.head_dim_v),
            "dlse": random(*rows).to(torch.float64 if self.dtype == torch.float64 else torch.float32),
        }
        if self.layout == "bshd":
            tensors.update({name: tensors[name].transpose(1, 2).contiguous() for name in ("q", "k", "v", "dout")})
        if self.alibi:
            shape = (self.heads,) if self.alibi == 1 else (self.batch, self.heads)
            tensors["alibi"] = torch.rand(shape, generator=generator, dtype=torch.float64).to(self.dtype) / 8
        if self.sinks:
            tensors["sinks"] = random(self.heads)
        return tensors

    def group(self) -> Any:
        if self.method != "usp":
            return dist.group.WORLD
        return _mesh(dist.get_world_size() // self.inner, self.inner)


_meshes: dict[tuple[int, int], Any] = {}


def _mesh(outer: int, inner: int) -> Any:
    if (outer, inner) not in _meshes:
        _meshes[outer, inner] = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("ring", "ulysses"))
    return _meshes[outer, inner]


def results(case: Case, tensors: dict[str, Tensor], attn: Any, **keywords: Any) -> dict[str, Tensor]:
    """out, lse and all gradients of a call."""
    names = [name for name in ("q", "k", "v", "alibi", "sinks") if name in tensors]
    leaves = {name: tensors[name].detach().clone().requires_grad_() for name in names}
    features = {name: leaves[name] for name in ("alibi", "sinks") if name in leaves}
    out, lse = attn(
        leaves["q"], leaves["k"], leaves["v"], **case.mask, softcap=case.softcap, layout=case.layout, return_lse=True,
        dropout=case.dropout, **features, **keywords,
    )  # fmt: skip
    outputs = [(out, tensors["dout"])]
    if case.uses_lse:
        # Gradients of the LSE of rows without keys are 0.
        outputs.append((lse.masked_fill(lse == -torch.inf, 0.0), tensors["dlse"]))
    grads = torch.autograd.grad([x for x, _ in outputs], list(leaves.values()), [grad for _, grad in outputs])
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": x for name, x in zip(names, grads)}}


def check(case: Case) -> None:
    """Compare a rank's shards of out, lse, dq, dk and dv with those of the full call.

    Gradients of slopes and sinks are summed over the ranks first.
    """
    full, group = case.inputs(), case.group()
    torch.manual_seed(0)
    expected = results(case, full, cute_flash.attn)
    rows = {name: 2 if case.layout == "bhsd" or name in ("lse", "dlse") else 1 for name in (*full, *expected)}
    sharded = ("q", "k", "v", "dout", "dlse")

    def shard(name: str, x: Tensor, pad_value: float = 0) -> Tensor:
        return cp.shard(x, group=group, dim=rows[name], sharding=case.sharding, pad_value=pad_value)

    local = {name: shard(name, x) if name in sharded else x for name, x in full.items()}
    where = {"group": group, "method": case.method, "sharding": case.sharding, "seqlen": case.seqlen}
    # The seed of dropout is that of the first rank.
    torch.manual_seed(dist.get_rank())
    found = results(case, local, cp.attn, **where)
    for name, x in found.items():
        if name in ("dalibi", "dsinks"):
            dist.all_reduce(x)
            y = expected[name]
        else:
            y = shard(name, expected[name], -torch.inf if name == "lse" else 0)
        assert_close(name, x, y, TOLERANCE[case.dtype])


def assert_close(name: str, x: Tensor, y: Tensor, tolerance: float) -> None:
    assert x.shape == y.shape and x.dtype == y.dtype, f"{name}: {x.shape} {x.dtype}, expected {y.shape} {y.dtype}"
    infinite = y == -torch.inf
    assert torch.equal(x == -torch.inf, infinite), f"{name}: rows without keys differ"
    error = (x.double() - y.double()).masked_fill(infinite, 0.0).abs().max() if x.numel() else 0.0
    size = max(1.0, float(y.masked_fill(infinite, 0.0).double().abs().max())) if y.numel() else 1.0
    assert error <= tolerance * size, f"{name}: error {float(error):.1e} of {size:.1e}"
