"""`cute-flash demo`: run attention on this machine, check the result, and show its cost.

With a GPU it compares the kernel's error with that of torch SDPA, and its time with the roofline. Without one it runs
the CPU path, explains the kernels for Ampere and Hopper, and compiles the one for Hopper to show its registers and
shared memory. Kernels stay in the disk cache: a second run compiles nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cute_flash import reference
from cute_flash.api import attn
from cute_flash.errors import InstallationError, UnsupportedError
from cute_flash.jit.toolchain import check_installed
from cute_flash.planning.plan import Plan
from cute_flash.spec import arch
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem
from cute_flash.tools import roofline
from cute_flash.tools.explain import Explanation
from cute_flash.tools.progress import step

PROBLEM = Problem(2, 8, 2, 1024, 1024, 128, "bfloat16", Band(None, 0))
# Runs the same kernel, because lengths are not compiled in.
LONG_PROBLEM = replace(PROBLEM, batch=4, heads=16, heads_kv=4, seqlen_q=4096, seqlen_k=4096)
# The kernels of these are explained without a GPU; that of the last is compiled, which takes seconds.
EXPLAINED_ARCHS = ("sm_80", "sm_90")
# The result is right if its errors are at most this many times those of `Comparison.yardstick`.
MAX_TIMES_YARDSTICK = 2.0
WARM_UP, LAUNCHES = 5, 20
# About 10 ms of GPU sleep, during which the host enqueues the timed launches.
SLEEP_CYCLES = 20_000_000
NEXT_STEPS = (
    "",
    "Next:",
    "  docs/getting-started.md, docs/cheatsheet.md         first calls, and the calls that people make",
    "  examples/getting_started.ipynb                      the same in a notebook, on the CPU or the GPU",
    "  cute-flash doctor                                   is everything installed?",
    "  cute-flash explain 2,16,4096,128 --causal --legend  kernel and least time of your shape, without a GPU",
    "  cute-flash inspect --head-dim 64 --arch sm_80       registers and instructions of another kernel, without a GPU",
)


def demo() -> int:
    """Run the demo and return 0, or 1 if the result is wrong."""
    gpu, reason = _gpu()
    comparison = _on_cpu(reason) if gpu is None else _on_gpu(gpu)
    path, result = "CPU" if gpu is None else "GPU", "right" if comparison.is_right else "WRONG"
    print("\n".join(["", f"{path} path: the result is {result}", *(NEXT_STEPS if comparison.is_right else ())]))
    return 0 if comparison.is_right else 1


def _gpu() -> tuple[arch.ArchSpec | None, str]:
    """The first GPU; None, with the reason, if there is none or the kernels do not support it."""
    if not torch.cuda.is_available():
        return None, "torch sees no CUDA GPU"
    try:
        return arch.detect(0), ""
    except UnsupportedError as error:
        return None, str(error)


def _on_gpu(gpu: arch.ArchSpec) -> Comparison:
    from cute_flash.jit.kernels import cache_info, compiled_kernel

    check_installed()
    print(f"GPU path: the kernel runs on {gpu.gpu} ({gpu.name}).\n")
    explanation = Explanation.of(PROBLEM, gpu)
    print("\n".join(explanation.lines()), flush=True)
    key = explanation.plan.main
    with step(f"loading {key.kernel}, or compiling it if the cache does not have it"):
        compiled_kernel(key)
    inputs = _inputs(PROBLEM, "cuda")
    comparison = Comparison.of(*inputs)
    print("\n".join(["", *comparison.lines(), ""]))
    for problem in (PROBLEM, LONG_PROBLEM):
        print(_timing(problem, gpu))
    print(f"kernels compiled by this run: {cache_info().compiles} (a new length needs no new kernel)")
    return comparison


def _on_cpu(reason: str) -> Comparison:
    print(f"CPU path: {reason}; attn() runs its PyTorch reference here.\n")
    inputs = _inputs(PROBLEM, "cpu")
    seconds = []
    with step("computing on the CPU, and comparing with exact attention in fp64"):
        for function in (attn, _sdpa):
            start = time.perf_counter()
            function(*inputs, causal=True)
            seconds.append(time.perf_counter() - start)
        comparison = Comparison.of(*inputs)
    print("\n".join(comparison.lines()))
    ours, torchs = (f"{1e3 * x:.0f} ms" for x in seconds)
    print(f"time        attn {ours}, torch SDPA in fp32 {torchs}, on the CPU")
    try:
        check_installed()
    except InstallationError as error:
        print(f"\nThe GPU kernels are not compiled: {error}")
        return comparison
    print("\nThe GPU kernels that would run:", flush=True)
    for name in EXPLAINED_ARCHS:
        explanation = Explanation.of(PROBLEM, arch.by_name(name))
        print("\n" + "\n".join(explanation.lines()), flush=True)
    with step(f"compiling {explanation.plan.main.kernel}, or loading it from the cache"):
        line = _resource_line(explanation.plan)
    print(line)
    return comparison


def _resource_line(plan: Plan) -> str:
    from cute_flash.jit.resources import cached_resources

    key, head_dim = plan.main, plan.problem.head_dim
    resources = cached_resources(key)
    return (
        f"compiled    D={head_dim} for {key.target}: {resources.registers_text} registers a thread, "
        f"{resources.spill_bytes} bytes spilled, {resources.mma}, {resources.smem_bytes / 1024:.0f} KB shared; "
        f"tile {key.tile}"
    )


def _inputs(problem: Problem, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def tensor(heads: int, length: int) -> Tensor:
        size = (problem.batch, heads, length, problem.head_dim)
        return torch.randn(size, generator=generator, device=device).to(getattr(torch, problem.dtype))

    q = tensor(problem.heads, problem.seqlen_q)
    return q, tensor(problem.heads_kv, problem.seqlen_k), tensor(problem.heads_kv, problem.seqlen_k)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Torch SDPA; in fp32 on the CPU, where 16-bit SDPA can take a minute and attn accumulates in fp32 too."""
    dtype = torch.float32 if q.device.type == "cpu" else q.dtype
    Q, K, V = (x.to(dtype) for x in (q, k, v))
    return scaled_dot_product_attention(Q, K, V, is_causal=causal, enable_gqa=True).to(q.dtype)


@dataclass(frozen=True)
class Error:
    """The largest and the mean absolute difference of two tensors."""

    largest: float
    mean: float

    @staticmethod
    def between(a: Tensor, b: Tensor) -> Error:
        difference = (a.double() - b.double()).abs()
        return Error(difference.max().item(), difference.mean().item())

    def __str__(self) -> str:
        return f"{self.largest:.1e} (mean {self.mean:.1e})"


@dataclass(frozen=True)
class Comparison:
    """Errors of attn and of torch SDPA against exact attention in fp64."""

    attn: Error
    sdpa: Error
    difference: Error  # between attn and SDPA
    yardstick: Error  # of unfused attention in the input's precision, `reference.dense_low_precision`

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor) -> Comparison:
        """Compare the results with a causal mask."""
        ours, torchs = attn(q, k, v, causal=True), _sdpa(q, k, v, causal=True)
        exact, _ = reference.dense(q, k, v, Band(None, 0))
        rough, _ = reference.dense_low_precision(q, k, v, Band(None, 0))
        return Comparison(
            attn=Error.between(ours, exact),
            sdpa=Error.between(torchs, exact),
            difference=Error.between(ours, torchs),
            yardstick=Error.between(rough, exact),
        )

    @property
    def is_right(self) -> bool:
        # The mean is checked too, because the largest errors of a causal output are always in its first rows.
        return (
            self.attn.largest <= MAX_TIMES_YARDSTICK * self.yardstick.largest
            and self.attn.mean <= MAX_TIMES_YARDSTICK * self.yardstick.mean
        )

    def lines(self) -> list[str]:
        verdict = "right: within" if self.is_right else "WRONG: not within"
        limit = f"{MAX_TIMES_YARDSTICK:.0f} x {self.yardstick}"
        return [
            f"max error   attn {self.attn}, torch SDPA {self.sdpa}, against exact attention in fp64",
            f"difference  {self.difference} between attn and torch SDPA",
            f"check       {verdict} {limit}, the error of unfused attention in this precision",
        ]


def _timing(problem: Problem, gpu: arch.ArchSpec) -> str:
    q, k, v = _inputs(problem, "cuda")
    bound = roofline.roofline(problem, gpu)
    ours, torchs = (_seconds(partial(function, q, k, v, causal=True)) for function in (attn, _sdpa))
    return (
        f"time        B={problem.batch} H={problem.heads} S={problem.seqlen_q} D={problem.head_dim} causal: "
        f"attn {ours * 1e6:.1f} us, {bound.flops / ours / 1e12:.0f} TFLOP/s, "
        f"{bound.seconds / ours:.0%} of the roofline; torch SDPA {torchs * 1e6:.1f} us"
    )


def _seconds(function: Callable[[], object]) -> float:
    """GPU time of one call in a sequence of back-to-back calls."""
    for _ in range(WARM_UP):
        function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    for _ in range(LAUNCHES):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / LAUNCHES
