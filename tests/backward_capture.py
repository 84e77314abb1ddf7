"""What the host path of gradients would launch, seen without a GPU: as `tests.launch_capture`.

    python -m tests.backward_capture FOLDER < requests

calls it on CPU tensors that say they are on a GPU, through the compiled kernels' own checks of arguments. It
reads a JSON list of requests and prints, for each, a JSON list of launches.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash import backward, backward_general, custom, general, operands, packed_cuda
from cute_flash.jit import compile as compiling
from cute_flash.planning.plan import BwdPlan, CompileKey, bwd_plan
from cute_flash.runtime import counters
from cute_flash.spec import arch
from cute_flash.spec.args import How
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Features, Problem
from tests import launch_capture, mod_cases, mod_gradients
from tests.combinations import RNG
from tests.launch_capture import COUNTER, OnGpu

BATCH, SQ, SK, HEADS, HEADS_KV = 2, 300, 500, 4, 2
WINDOW = 50, 0


@dataclass(frozen=True)
class Request:
    """One call, of the sizes above."""

    arch: str
    head_dim: int = 64
    names: tuple[str, ...] = ()  # of features; `varlen` packs two sequences
    deterministic: bool = False
    head_dim_v: int | None = None
    kind: str = ""  # of `mod_cases.KINDS`, instead of features

    @property
    def is_packed(self) -> bool:
        return "varlen" in self.names

    def plan(self) -> BwdPlan:
        if self.kind:
            return mod_gradients.plan_of(case_of(self.kind), arch.ARCHS[self.arch], self.deterministic)
        features = Features(**dict.fromkeys(self.names, True))
        lengths = (BATCH * SQ, BATCH * SK) if self.is_packed else (SQ, SK)
        sizes = (BATCH, HEADS, HEADS_KV, *lengths, self.head_dim)
        problem = Problem(*sizes, "bfloat16", Band(*WINDOW), self.head_dim_v, features)
        return bwd_plan(problem, arch.ARCHS[self.arch], self.deterministic)

    def how(self) -> How:
        """Slopes of one batch for all, and of another type; of a packed one, of each sequence."""
        some: dict[str, Any] = {
            "softcap": 2.0,
            "alibi": torch.ones((BATCH, HEADS) if self.is_packed else HEADS, dtype=torch.bfloat16),
            "sinks": torch.ones(HEADS),
            "dropout": 0.9,
        }
        asked: dict[str, Any] = {name: some[name] for name in self.names if name != "varlen"}
        if "dropout" in asked:
            asked["rng"] = torch.tensor(RNG)
        if self.is_packed:
            offsets = {"cu_seqlens_q": SQ, "cu_seqlens_k": SK}
            asked |= {name: torch.tensor([0, 7, BATCH * size]).int() for name, size in offsets.items()}
        return How(0.1, *WINDOW, self.deterministic, **asked)

    def call(self) -> None:
        if self.kind:
            _call_kind(self.kind, self.deterministic)
            return
        widths = self.head_dim, self.head_dim_v or self.head_dim
        q, out = (torch.zeros(BATCH, HEADS, SQ, width).bfloat16() for width in widths)
        k, v = (torch.zeros(BATCH, HEADS_KV, SK, width).bfloat16() for width in widths)
        lse = torch.zeros(BATCH, HEADS, SQ)
        if self.is_packed:
            q, k, v, out = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, out))
            lse = lse.transpose(0, 1).flatten(1)
        found = general._bwd_cuda(out, lse, q, k, v, out, lse, *self.how())
        assert [x.shape for x in found[:3]] == [q.shape, k.shape, v.shape]


class Launched(NamedTuple):
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem_bytes: int


def capture(requests: list[Request], folder: Path) -> list[list[Launched]]:
    """Run the requests in a process of their own."""
    answers = launch_capture.answers_of("tests.backward_capture", [asdict(one) for one in requests], folder)
    return [[Launched(name, tuple(grid), tuple(block), n) for name, grid, block, n in one] for one in answers]


def case_of(kind: str, seed: int = 1) -> mod_cases.Case:
    chosen = next(one for one in mod_cases.KINDS if one.id == kind)
    return mod_cases.Case(chosen, mod_cases.Sizes(2, HEADS, HEADS_KV, SQ, SK), seed, "cpu")


def _call_kind(kind: str, deterministic: bool) -> None:
    """The gradients of all that a case has."""
    case = case_of(kind)
    leaves = mod_gradients.leaves_of(case)
    how, asked = case.call()
    q, k, v = (leaves[name].detach() for name in "qkv")
    lse = torch.zeros(2, HEADS, SQ)
    how = how._replace(deterministic=deterministic)
    found = custom._bwd_cuda(q, lse, q, k, v, q, lse, *how, *asked)
    assert [x.shape for x in found[:3]] == [q.shape, k.shape, v.shape]


def main() -> None:
    stub = launch_capture._build_stub(Path(sys.argv[1]))
    captured = ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL).captured
    preload, compiled = compiling._preload, compiling.compiled_kernel
    launches: list[Launched] = []

    def compiled_kernel(key: CompileKey) -> Callable[..., None]:
        import tvm_ffi

        function = compiled(key)

        def launch(*args: Any) -> None:
            held: list[OnGpu] = []

            def passed(x: Any) -> Any:
                if isinstance(x, list):
                    return list(map(passed, x))
                if not isinstance(x, Tensor):
                    return x
                held.append(OnGpu(x.detach()))
                return tvm_ffi.from_dlpack(held[-1])

            function(*map(passed, args))
            numbers = (ctypes.c_int64 * 8)()
            captured(numbers)
            launches.append(Launched(key.kernel, tuple(numbers[1:4]), tuple(numbers[4:7]), numbers[7]))

        return launch

    compiling._preload = lambda library: preload(str(stub))  # type: ignore[assignment]
    compiling.compiled_kernel = compiled_kernel
    counters.counter = lambda index: (None, COUNTER)  # type: ignore[assignment]
    operands.current_device = lambda: None
    answers = []
    for request in (Request(**fields) for fields in json.load(sys.stdin)):
        arch.detect = lambda index, name=request.arch: arch.ARCHS[name]  # type: ignore[assignment,misc]
        # What was prepared is of another GPU.
        for known in (backward._launches, backward_general._launches, packed_cuda._bwd_launches):
            known.clear()
        launches.clear()
        request.call()
        answers.append(list(launches))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
