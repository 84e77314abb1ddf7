"""`cute_flash.flex_attention` beside torch's FlexAttention; see `tests.upstream`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import BlockMask, _vmap_for_bhqkv, create_block_mask, flex_attention

import cute_flash
from cute_flash.errors import UnsupportedError
from cute_flash.score_mod.trace import TraceError
from tests.upstream.flex_mods import MODS, TIMED, Case, Shape
from tests.upstream.jobs import Job
from tests.upstream.recording import HAS_GPU, recording, save

DEVICE = "cuda" if HAS_GPU else "cpu"
CHECKED = Shape(1024, batch=2, heads=4, device=DEVICE)
TIMED_SHAPE = Shape(4096, batch=2, heads=16, device=DEVICE)
HEAD_DIMS = (64, 128)
# The limit of our error is this multiple of the error of torch's compiled kernels, plus a bf16 rounding of the largest
# value.
MAX_RATIO = 2.0
ROUNDS, BUDGET_MS = 12, 5.0


class Inputs(NamedTuple):
    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask | None
    dout: Tensor

    def out(self, function: Callable[..., Tensor]) -> Tensor:
        return function(self.q, self.k, self.v, score_mod=self.case.score_mod, block_mask=self.mask)

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (self.q, self.k, self.v, *self.case.learned), self.dout.to(out.dtype))

    def results(self, function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = self.out(function)
        return (out, *self.gradients(out))


def make_inputs(name: str, head_dim: int, shape: Shape) -> Inputs:
    case = MODS[name](shape)
    B, H, Sk, Sq = shape.batch, shape.heads, shape.length, case.seqlen_q or shape.length
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, H, S, head_dim, device=DEVICE, generator=generator).bfloat16() for S in (Sq, Sk, Sk, Sq)
    )
    mask = None
    if case.mask_mod is not None:
        sizes = (B if "b" in case.depends_on else None, H if "h" in case.depends_on else None, Sq, Sk)
        mask = create_block_mask(case.mask_mod, *sizes, device=DEVICE)
    return Inputs(case, q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), mask, dout)


def reference(inputs: Inputs) -> Tensor:
    """Dense attention in fp32. A row without a key is 0."""
    q, k, v = (x.float() for x in inputs[1:4])
    scores = q @ k.mT * q.shape[-1] ** -0.5
    indices = [torch.arange(size, device=q.device) for size in scores.shape]
    with TransformGetItemToIndex():
        if inputs.case.score_mod is not None:
            scores = _vmap_for_bhqkv(inputs.case.score_mod, prefix=(0,))(scores, *indices)
        if inputs.case.mask_mod is not None:
            is_visible = _vmap_for_bhqkv(inputs.case.mask_mod, prefix=())(*indices)
            scores = scores.masked_fill(~is_visible, -torch.inf)
    has_key = scores.amax(-1, keepdim=True) > -torch.inf
    return torch.where(has_key, torch.softmax(scores, -1), 0.0) @ v


def check(name: str, head_dim: int) -> dict[str, Any]:
    """Errors of the result and of all gradients, and whether they are small enough."""
    inputs = make_inputs(name, head_dim, CHECKED)
    try:
        ours = inputs.results(cute_flash.flex_attention)
    except (TraceError, UnsupportedError) as error:
        return {"status": "refused", "why": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    out = reference(inputs)
    exact = (out, *inputs.gradients(out))
    result: dict[str, Any] = {}
    peer: tuple[Tensor, ...] | None = None
    try:
        peer = inputs.results(torch.compile(flex_attention, dynamic=False))
    except Exception as error:
        result["torch_error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    labels = ["out", "dq", "dk", "dv", *(f"dlearned{i}" for i in range(len(inputs.case.learned)))]
    for i, label in enumerate(labels):
        largest = exact[i].abs().max().item()
        row = {"ours": _error(ours[i], exact[i]), "max": largest}
        limit = 2**-7 * largest + 1e-3
        if peer is not None:
            row["torch"] = _error(peer[i], exact[i])
            limit = MAX_RATIO * row["torch"] + 2**-8 * largest + 1e-5
        result[label] = {**row, "ok": row["ours"] <= limit}  # False if the error is NaN
    is_good = all(result[label]["ok"] for label in labels)
    return result | {"status": "passed" if is_good else "failed"}


def _error(x: Tensor, exact: Tensor) -> float:
    return (x.float() - exact).abs().max().item()


def check_all(job: Job) -> None:
    rows = []
    for name, head_dim in _share(job, job.mods or MODS):
        begin = time.monotonic()
        torch._dynamo.reset()
        try:
            row = check(name, head_dim)
        except Exception as error:
            row = {"status": "error", "why": f"{type(error).__name__}: {str(error)[:400]}"}
        row |= {"mod": name, "D": head_dim, "seconds": round(time.monotonic() - begin, 1)}
        print(f"{row['status']:8} {name} D={head_dim} {row['seconds']} s {row.get('why', '')[:200]}", flush=True)
        rows.append(row)
        job.path("json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def record(job: Job) -> None:
    keys = []
    for name, head_dim in _share(job, job.mods or MODS):
        # Shapes of the timing are too large for a machine without a GPU.
        for shape in (CHECKED, TIMED_SHAPE) if HAS_GPU and name in TIMED else (CHECKED,):
            try:
                inputs = make_inputs(name, head_dim, shape)
                with recording() as own:
                    inputs.results(cute_flash.flex_attention)
                keys += own
            except Exception as error:  # `check` reports it
                print(f"{name} D={head_dim}: {type(error).__name__}: {error}", flush=True)
    save(keys, job)


def _share(job: Job, names: Any) -> list[tuple[str, int]]:
    return [(name, head_dim) for name in names for head_dim in HEAD_DIMS][job.index :: job.processes]


def time_all(job: Job) -> None:
    """Device time in CUDA graphs. The time of the backward is the time of both passes less that of the forward."""
    from profiling.measure.tables import geometric_mean
    from profiling.measure.timing import GraphTimer, TimedCall, measure

    timer = GraphTimer()
    rows: list[dict[str, Any]] = []
    for name, head_dim in _share(job, job.mods or TIMED):
        inputs = make_inputs(name, head_dim, TIMED_SHAPE)
        torch._dynamo.reset()
        functions = {"ours": cute_flash.flex_attention, "torch": torch.compile(flex_attention, dynamic=False)}
        if job.step == "warm":
            for side, function in functions.items():
                try:
                    inputs.results(function)
                except Exception as error:  # the measurement reports it
                    print(f"{name} D={head_dim} {side}: {type(error).__name__}: {error}", flush=True)
            continue
        calls = {}
        for side, function in functions.items():
            calls[f"{side} fwd"] = TimedCall(partial(inputs.out, function))
            calls[f"{side} both"] = TimedCall(partial(inputs.results, function))
        measured = measure(calls, timer, ROUNDS, BUDGET_MS)
        if measured.errors:
            print(f"{name} D={head_dim}: {measured.errors}", flush=True)
            continue
        ms = {label: samples.median_ms for label, samples in measured.samples.items()}
        ms |= {f"{side} bwd": ms[f"{side} both"] - ms[f"{side} fwd"] for side in functions}
        ratios = {direction: ms[f"torch {direction}"] / ms[f"ours {direction}"] for direction in ("fwd", "bwd")}
        rows.append({"mod": name, "D": head_dim, "ms": ms, "speedup": ratios})
        job.path("json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        numbers = (f"{d} {ms[f'ours {d}']:.3f} ms, {ratios[d]:.2f} times as fast as torch" for d in ratios)
        print(f"{name:24} D={head_dim:3} {'; '.join(numbers)}", flush=True)
    for direction in ("fwd", "bwd") if rows else ():
        mean = geometric_mean([row["speedup"][direction] for row in rows])
        print(f"geometric mean of {direction} over compiled FlexAttention: {mean:.3f} ({len(rows)} cases)")


def main() -> None:
    job = Job.current()
    # An empty package in place of attention-gym's __init__, which imports plotting libraries.
    package = sys.modules["attn_gym"] = ModuleType("attn_gym")
    package.__path__ = [str(job.source("attention-gym/attn_gym"))]
    {"record": record, "check": check_all, "warm": time_all, "time": time_all}[job.step](job)


if __name__ == "__main__":
    main()
