"""fp32 calls that the GPU tests compare with fp64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cute_flash import attn, attn_varlen, masks, ops
from cute_flash.planning.plan import CompileKey
from cute_flash.reference import cpu
from cute_flash.spec.arch import ArchSpec
from tests.fakes.recording import backward_keys, forward_keys
from tests.lengths import Lengths

HEADS, HEADS_KV = 4, 2


@dataclass(frozen=True)
class Case:
    name: str
    head_dim: int = 64
    head_dim_v: int | None = None
    seqlens: tuple[int, int] = (200, 331)
    keywords: dict[str, Any] = field(default_factory=dict)
    lengths: Lengths | None = None
    magnitude: float = 1.0

    @property
    def id(self) -> str:
        return f"{self.name}-d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v else "")

    def inputs(self, device: str) -> dict[str, Tensor]:
        """q, k, v, and the tensors of features, in fp32."""
        generator = torch.Generator().manual_seed(0)
        sq, sk = self.seqlens if self.lengths is None else (sum(self.lengths.queries), sum(self.lengths.keys))
        tensors = {}
        for name, heads, rows in (("q", HEADS, sq), ("k", HEADS_KV, sk), ("v", HEADS_KV, sk)):
            width = (self.head_dim_v or self.head_dim) if name == "v" else self.head_dim
            shape = (2, heads, rows, width) if self.lengths is None else (rows, heads, width)
            tensors[name] = torch.randn(shape, generator=generator) * self.magnitude
        for name, x in self.keywords.items():
            if isinstance(x, Tensor):
                tensors[name] = x
        return {name: x.to(device) for name, x in tensors.items()}

    def attend(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """out and lse."""
        q, k, v, *_ = tensors.values()
        others = {name: x for name, x in tensors.items() if name not in "qkv"}
        others |= {name: x for name, x in self.keywords.items() if not isinstance(x, Tensor)}
        if self.lengths is None:
            return attn(q, k, v, **others, return_lse=True)
        return attn_varlen(q, k, v, **self.lengths.args(q.device), **others, return_lse=True)


SLOPES, SINKS = torch.linspace(0.02, 0.5, HEADS), torch.linspace(-1, 2, HEADS)
BIAS = torch.randn(1, HEADS, 200, 331, generator=torch.Generator().manual_seed(1))
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (40, 25)},
    "softcap": {"softcap": 2.0, "causal": True},
    "large_softcap": {"softcap": 50.0},
    "alibi": {"alibi": SLOPES},
    "sinks": {"sinks": SINKS, "causal": True},
    "dropout": {"dropout": 0.25},
    "bias": {"bias": BIAS},
    "mask_mod": {"mask_mod": masks.prefix_lm(50)},
    "several": {"softcap": 5.0, "alibi": SLOPES, "sinks": SINKS, "dropout": 0.1, "causal": True},
}
LENGTHS = Lengths([100, 0, 257, 31], [90, 4, 300, 0])
CASES = [
    *(Case(name, (64, 128)[i % 2], keywords=options) for i, (name, options) in enumerate(FEATURES.items())),
    *(Case("widths", *widths, keywords={"causal": True}) for widths in ((40,), (96,), (8,), (128, 64), (64, 128))),
    *(Case("varlen", d, keywords={"causal": c}, lengths=LENGTHS) for d, c in ((64, True), (128, False))),
    Case("large", magnitude=1e12, keywords={"scale": 1e-25}),
    Case("small", magnitude=1e-15),
]


def keys(arch: ArchSpec) -> Iterator[CompileKey]:
    """The kernels of all cases, forward and backward."""
    for case in CASES:
        calls: list[tuple] = []

        def record(*call: Any, calls: list[tuple] = calls) -> Any:
            calls.append(call[:4])
            return cpu.forward(*calls[-1])

        with mock.patch.object(ops, "attention", record):
            case.attend(case.inputs("cpu"))
        for call in calls:
            yield from forward_keys(*call, arch)
            yield from backward_keys(*call, arch, has_dlse=True)
