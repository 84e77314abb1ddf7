"""What all rungs share: their problem, how they are compiled, checked and timed, and their command line.

A rung is a class with a `@cute.jit` method `__call__`, which launches its kernels:

    Forward(head_dim, is_causal)(q, k, v, out, scale, stream)                                          # rungs 0 to 8
    Backward(head_dim, is_causal)(q, k, v, dout, lse, delta, dq, dk, dv, scale, stream)                # rungs B1 to B3

Tensors are (heads, S, D) with the heads of all sequences in the first dimension: bf16, except fp32 for the statistics
`lse` and `delta` (heads, S) and for `dq`. Every length works. A class has the attribute `ARCH`, the oldest
architecture that it runs on, and may have `SCRATCH`, the names of (heads, S, S) fp32 tensors that it needs after `out`.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cute_flash
from cute_flash.jit import compile as compiling
from cute_flash.jit.disk import DiskCache
from cute_flash.jit.kernels import load_object
from cute_flash.jit.resources import Resources, compile_with_resources
from cute_flash.jit.toolchain import toolchain

HEAD_DIMS = (64, 128)
BATCH, HEADS, SEQLEN = 2, 16, 4096  # of the timed problem
ODD_SEQLENS = (1, 63, 200, 515)
# The largest error of an element, as a multiple of the largest error of torch's SDPA in bf16.
MAX_ERROR_RATIO = 2.0
INPUTS = {"Forward": ("q", "k", "v", "out"), "Backward": ("q", "k", "v", "dout", "lse", "delta", "dq", "dk", "dv")}
FP32 = ("lse", "delta", "dq")
STATISTICS = ("lse", "delta")


def compile_rung(rung: Any, target: str) -> tuple[Resources, Callable[..., None]]:
    """Compile a rung for an architecture, such as "sm_80" or "sm_90a"; no GPU is needed."""
    heads, seqlen = cute.sym_int(), cute.sym_int()

    def fake(name: str) -> cute.Tensor:
        shape = (heads, seqlen) if name in STATISTICS else (heads, seqlen, rung.head_dim)
        shape = (heads, seqlen, seqlen) if name in scratch else shape
        order = tuple(reversed(range(len(shape))))
        is_fp32 = name in FP32 + scratch
        alignment = 4 if name in STATISTICS + scratch else 16
        return make_fake_compact_tensor(
            Float32 if is_fp32 else BFloat16, shape, stride_order=order, assumed_align=alignment
        )

    scratch = getattr(rung, "SCRATCH", ())
    tensors = [fake(name) for name in (*INPUTS[type(rung).__name__], *scratch)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with compiling.lock:
        return compile_with_resources(
            lambda options: cute.compile(
                rung, *tensors, Float32(1.0), stream, options=f"--gpu-arch {target} --enable-tvm-ffi {options}"
            ),
            target,
            rung.smem_bytes,
        )


def precompile(rung: Any, target: str) -> Path:
    """The shared object of a rung in the kernel cache. It is compiled if the cache does not have it."""
    cache, name = DiskCache.default(), _object_name(rung, target)
    with cache.locked(name):
        path = cache.find(name, ".so")
        return path or cache.store(name, *compiling.export(compile_rung(rung, target)[1]))


def _object_name(rung: Any, target: str) -> str:
    """A digest of the sources, of the versions of the compiler, and of the rung."""
    module = sys.modules[type(rung).__module__]
    own = Path(module.__file__ or "")
    sources = (own, *(Path(__file__).with_name(name) for name in ("harness.py", "hopper.py", "tools.py")))
    texts = [path.read_text(encoding="utf-8") for path in sources if path.exists()]
    sizes = sorted((name, value) for name, value in vars(module).items() if isinstance(value, int))
    facts = (texts, toolchain(), sizes, sorted(vars(rung).items()), getattr(rung, "variant", None), target)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:40]


@cache
def launcher(rung_class: Any, head_dim: int, is_causal: bool) -> Callable[..., None]:
    """The compiled rung for the GPU here."""
    return load_object(precompile(rung_class(head_dim, is_causal), target_of(*torch.cuda.get_device_capability())))


def target_of(major: int, minor: int) -> str:
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def random_inputs(batch: int, heads: int, seqlen: int, head_dim: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, heads, seqlen, head_dim, device="cuda").bfloat16() for _ in range(4)]


def forward_call(
    rung_class: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool
) -> tuple[Callable[[], None], Tensor]:
    """A function that runs a rung, and the tensor that it writes, which holds NaN before."""
    launch = launcher(rung_class, q.shape[-1], is_causal)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = torch.full_like(q, torch.nan)
    shape = (*q.shape[:2], q.shape[1])
    scratch = [torch.full(shape, torch.nan, device="cuda") for _ in getattr(rung_class, "SCRATCH", ())]
    scale = q.shape[-1] ** -0.5
    return lambda: launch(q, k, v, out, *scratch, scale), out


def backward_call(
    rung_class: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, is_causal: bool
) -> tuple[Callable[[], None], tuple[Tensor, Tensor, Tensor]]:
    """A function that runs a rung, and its gradients. dq is zeroed by each call."""
    launch = launcher(rung_class, q.shape[-1], is_causal)
    out, lse = cute_flash.attn(q, k, v, causal=is_causal, return_lse=True)
    delta = (dout.float() * out.float()).sum(-1)
    q, k, v, dout, lse, delta = (x.flatten(0, 1) for x in (q, k, v, dout, lse, delta))
    dq, dk, dv = torch.empty_like(q, dtype=torch.float32), *(torch.full_like(k, torch.nan) for _ in range(2))
    scale = q.shape[-1] ** -0.5

    def run() -> None:
        dq.zero_()
        launch(q, k, v, dout, lse, delta, dq, dk, dv, scale)

    return run, (dq, dk, dv)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    """The output and the gradients by SDPA in the dtype of the inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(*inputs, is_causal=is_causal)
    return out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))


def check(rung_class: Any, head_dim: int, is_causal: bool, seqlen: int) -> float:
    """The largest error of an element of the results, over that of torch's SDPA in bf16. The exact ones are fp64."""
    q, k, v, dout = random_inputs(2, 3, seqlen, head_dim)
    references = by_sdpa(*(x.double() for x in (q, k, v, dout)), is_causal)
    theirs = by_sdpa(q, k, v, dout, is_causal)
    if rung_class.__name__ == "Forward":
        run, out = forward_call(rung_class, q, k, v, is_causal)
        run()
        ours, references, theirs = (out,), references[:1], theirs[:1]
    else:
        run, ours = backward_call(rung_class, q, k, v, dout, is_causal)
        run()
        references, theirs = references[1:], theirs[1:]
    ratios = []
    for x, other, reference in zip(ours, theirs, references, strict=True):
        error = (x.double().view_as(reference) - reference).abs().max().item()
        # One key: the exact dq is 0, and so is SDPA's.
        yardstick = max((other.double() - reference).abs().max().item(), 1e-3)
        ratios.append(error / yardstick if error == error else float("inf"))
    return max(ratios)


def milliseconds(run: Callable[[], Any]) -> float:
    """The device time of a call: the median of five CUDA graphs, each of about 20 ms of calls."""

    def replay(graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def graph_of(calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                run()
        return graph

    run()
    torch.cuda.synchronize()
    once = graph_of(1)
    replay(once)
    calls = max(1, int(20 / replay(once)))
    several = graph_of(calls)
    replay(several)
    return sorted(replay(several) / calls for _ in range(5))[2]


def flops(head_dim: int, is_causal: bool, direction: str, seqlen: int = SEQLEN) -> float:
    """The FLOPs of the timed problem: two products forward, five backward; half of them if causal."""
    products = {"Forward": 2, "Backward": 5}[direction]
    return products * 2.0 * BATCH * HEADS * seqlen**2 * head_dim * (0.5 if is_causal else 1.0)


def tflops(rung_class: Any, head_dim: int, is_causal: bool) -> float:
    """TFLOP/s of a rung on the timed problem."""
    q, k, v, dout = random_inputs(BATCH, HEADS, SEQLEN, head_dim)
    if rung_class.__name__ == "Forward":
        run, _ = forward_call(rung_class, q, k, v, is_causal)
    else:
        run, _ = backward_call(rung_class, q, k, v, dout, is_causal)
    return flops(head_dim, is_causal, rung_class.__name__) / milliseconds(run) / 1e9


def obstacle(rung: Any) -> str:
    """Why the GPU here cannot run a rung; empty if it can."""
    properties = torch.cuda.get_device_properties(0)
    if rung.ARCH == "sm_90a" and (properties.major, properties.minor) != (9, 0):
        return "needs Hopper"
    if rung.smem_bytes > properties.shared_memory_per_block_optin:
        return f"needs {rung.smem_bytes / 1024:.0f} KB of shared memory"
    return ""


def parser_of(rung_class: Any) -> argparse.ArgumentParser:
    """The command line of one rung."""
    parser = argparse.ArgumentParser(description=sys.modules[rung_class.__module__].__doc__)
    parser.add_argument("--arch", default=rung_class.ARCH, help="compile for it (without a GPU; default: %(default)s)")
    parser.add_argument("--dump", action="store_true", help="print the shared-memory tiles and their bank conflicts")
    if hasattr(rung_class, "VARIANTS"):
        parser.add_argument("--variant", choices=rung_class.VARIANTS, help="order of the tiles in shared memory")
    return parser


def main(rung_class: Any) -> None:
    """Check and time one rung on a GPU; without one, compile it."""
    args = parser_of(rung_class).parse_args()
    if getattr(args, "variant", None):
        rung_class.variant = args.variant
    for head_dim in HEAD_DIMS:
        for is_causal in (False, True):
            name, rung = f"D={head_dim} {'causal' if is_causal else 'full'}", rung_class(head_dim, is_causal)
            if not torch.cuda.is_available():
                resources, _ = compile_rung(rung, args.arch)
                print(name, *resources.lines(), sep="\n  ")
                if resources.serialised_wgmma:
                    print(f"  ptxas serialised wgmma: {', '.join(resources.serialised_wgmma)}")
            elif reason := obstacle(rung):
                print(f"{name}: {reason}")
            else:
                worst = max(check(rung_class, head_dim, is_causal, seqlen) for seqlen in ODD_SEQLENS)
                verdict = "right" if worst <= MAX_ERROR_RATIO else "WRONG"
                # torch captures graphs on streams other than the default one.
                with torch.cuda.stream(torch.cuda.Stream()):
                    speed = tflops(rung_class, head_dim, is_causal)
                print(f"{name}: {verdict}, error {worst:.2f} x SDPA's, {speed:.0f} TFLOP/s at S={SEQLEN}")
    if args.dump:
        dump(rung_class)


def dump(rung_class: Any) -> None:
    """Print the banks of a tile of a rung, and the conflicts of its accesses to shared memory."""
    if not hasattr(rung_class, "variant"):
        print("The conflicts of this rung are not predicted: its tiles have no ldmatrix.")
        return
    from examples.ladder.conflicts import picture, report

    print(picture(rung_class(HEAD_DIMS[0], False)))
    for head_dim in HEAD_DIMS:
        print(report(rung_class(head_dim, False)))
