"""What the host path of gradients with features would launch, seen without a GPU: as `tests.launch_capture`.

    python -m tests.backward_capture FOLDER ARCH HEAD_DIM[/WIDTH_OF_VALUES] DETERMINISTIC FEATURE...
    python -m tests.backward_capture FOLDER ARCH HEAD_DIM DETERMINISTIC kind=KIND     of `mod_cases.KINDS`

calls it on CPU tensors that say they are on a GPU, through the compiled kernels' own checks of arguments,
and prints a JSON list of (kernel, grid, block, shared memory). The feature `varlen` packs two sequences.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cute_flash import arch, counters, custom, general, operands
from cute_flash import compile as compiling
from cute_flash.how import How
from cute_flash.plan import CompileKey
from tests import launch_capture, mod_cases, mod_gradients
from tests.combinations import RNG
from tests.launch_capture import COUNTER, OnGpu

BATCH, SQ, SK, HEADS, HEADS_KV = 2, 300, 500, 4, 2


def how_of(names: list[str], deterministic: bool) -> How:
    """Slopes of one batch for all, and of another type; of a packed one, of each sequence."""
    is_packed = "varlen" in names
    some: dict[str, Any] = {
        "softcap": 2.0,
        "alibi": torch.ones((BATCH, HEADS) if is_packed else HEADS, dtype=torch.bfloat16),
        "sinks": torch.ones(HEADS),
        "dropout": 0.9,
    }
    asked: dict[str, Any] = {name: some[name] for name in names if name != "varlen"}
    if "dropout" in names:
        asked["rng"] = torch.tensor(RNG)
    if is_packed:
        offsets = {"cu_seqlens_q": SQ, "cu_seqlens_k": SK}
        asked |= {name: torch.tensor([0, 7, BATCH * size]).int() for name, size in offsets.items()}
    return How(0.1, 50, 0, deterministic, **asked)


def main() -> None:
    folder, name, head_dim, deterministic, *names = sys.argv[1:]
    stub = launch_capture._build_stub(Path(folder))
    captured = ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL).captured
    preload, compiled = compiling._preload, compiling.compiled_kernel
    launches: list[Any] = []

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
            launches.append((key.kernel, list(numbers[1:4]), list(numbers[4:7]), numbers[7]))

        return launch

    compiling._preload = lambda library: preload(str(stub))  # type: ignore[assignment]
    compiling.compiled_kernel = compiled_kernel
    arch.detect = lambda index: arch.ARCHS[name]  # type: ignore[assignment]
    counters.counter = lambda index: (None, COUNTER)  # type: ignore[assignment]
    operands.current_device = lambda: None
    widths = [int(width) for width in (head_dim.split("/") * 2)[:2]]
    q, out = (torch.zeros(BATCH, HEADS, SQ, width).bfloat16() for width in widths)
    k, v = (torch.zeros(BATCH, HEADS_KV, SK, width).bfloat16() for width in widths)
    lse = torch.zeros(BATCH, HEADS, SQ)
    if "varlen" in names:
        q, k, v, out = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, out))
        lse = lse.transpose(0, 1).flatten(1)
    if names and names[0].startswith("kind="):
        found = _of_kind(names[0].removeprefix("kind="), bool(int(deterministic)))
    else:
        found = general._bwd_cuda(out, lse, q, k, v, out, lse, *how_of(names, bool(int(deterministic))))
    assert [x.shape for x in found[:3]] == [q.shape, k.shape, v.shape]
    json.dump(launches, sys.stdout)


def case_of(kind: str, seed: int = 1) -> mod_cases.Case:
    chosen = next(one for one in mod_cases.KINDS if one.id == kind)
    return mod_cases.Case(chosen, mod_cases.Sizes(2, HEADS, HEADS_KV, SQ, SK), seed, "cpu")


def _of_kind(kind: str, deterministic: bool) -> Any:
    """The gradients of all that a case has."""
    case = case_of(kind)
    leaves = mod_gradients.leaves_of(case)
    how, asked = case.call()
    q, k, v = (leaves[name].detach() for name in "qkv")
    lse = torch.zeros(2, HEADS, SQ)
    how = how._replace(deterministic=deterministic)
    return custom._bwd_cuda(q, lse, q, k, v, q, lse, *how, *asked)


if __name__ == "__main__":
    main()
