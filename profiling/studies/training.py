"""Tokens per second of a training step, through each integration of cute_flash and through other libraries.

The model is the stack of layers of a Llama with 1B parameters: RMSNorm, rotary embedding, grouped-query attention and
SwiGLU, with random bf16 weights, without embedding and loss. A step is a forward and a backward pass.
All attention functions (`peers.integrations`) run in the same eager model. The output and the gradients of each are
first compared with those of `cute_flash.attn`. Then all are timed in one run, in interleaved rounds. The times include
host time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from cute_flash.planning.launch import LaunchKey
from profiling.measure.accuracy import relative_difference
from profiling.measure.launches import needed_kernels
from profiling.measure.options import MS, ROUNDS, option
from profiling.measure.study import Record, Step, Study, Tools, failures_in
from profiling.measure.tables import Table
from profiling.measure.timing import TimedCall, attempt_each, measure
from profiling.peers.integrations import ATTENTIONS, ON_CPU, OURS, Attention, Function

# The largest accepted relative difference, ‖a - b‖ / ‖b‖, of the output or a gradient. Roundings to bf16 add up over
# the layers.
AGREEMENT = 0.05
# An estimate for an H200 with 16 cores: 20 s to compile, 20 s for FlexAttention's kernels, 100 s of steps, and imports.
EXPECTED_SECONDS = 130
METHOD = {
    "time": "forward and backward of the layers, with host time; median of interleaved rounds",
    "check": f"output and gradients against {OURS}: relative difference (Frobenius norm) below {AGREEMENT}",
}


@dataclass(frozen=True)
class Model:
    """The shape of Llama 3.2 1B."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    heads_kv: int = 8
    intermediate: int = 8192
    rope_theta: float = 500000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Settings:
    model: Model = field(default_factory=Model)
    lengths: tuple[int, ...] = option((4096, 8192))
    tokens: int = 16384
    dtype: str = "bfloat16"
    rounds: int = ROUNDS(4)
    ms: float = MS(500.0)
    seed: int = 0


# For a dry run, in fp32: not every CPU has matrix products in bf16.
SMALL = Settings(Model(2, 64, 4, 2, 96), lengths=(16, 32), tokens=64, dtype="float32", rounds=2, ms=1.0)


def attentions(tools: Tools) -> Sequence[Attention]:
    """On the CPU, for a dry run: those that take CPU tensors."""
    return ATTENTIONS if tools.device.type == "cuda" else ON_CPU


# ---- the model
# -------------------------------------------------------------------------------------------------------


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Layer(nn.Module):
    def __init__(self, model: Model, **where: Any) -> None:
        super().__init__()
        self.model = model
        kv = model.heads_kv * model.head_dim
        linear: Callable[[int, int], nn.Linear] = partial(nn.Linear, bias=False, **where)
        self.q, self.o = linear(model.hidden, model.hidden), linear(model.hidden, model.hidden)
        self.k, self.v = linear(model.hidden, kv), linear(model.hidden, kv)
        self.gate, self.up = (linear(model.hidden, model.intermediate) for _ in range(2))
        self.down = linear(model.intermediate, model.hidden)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(model.hidden, **where)) for _ in range(2))

    def forward(self, x: Tensor, attend: Function, cos: Tensor, sin: Tensor) -> Tensor:
        y = rms_norm(x, (self.model.hidden,), self.norms[0], 1e-5)
        q, k, v = (project(y).unflatten(-1, (-1, self.model.head_dim)) for project in (self.q, self.k, self.v))
        out = attend(_rotated(q, cos, sin), _rotated(k, cos, sin), v)
        x = x + self.o(out.flatten(2))
        y = rms_norm(x, (self.model.hidden,), self.norms[1], 1e-5)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Stack:
    """The layers, and one batch: its input, and the gradient of its output."""

    def __init__(self, settings: Settings, seqlen: int, device: torch.device) -> None:
        model = settings.model
        torch.manual_seed(settings.seed)
        dtype = getattr(torch, settings.dtype)
        where = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList(Layer(model, **where) for _ in range(model.layers))
        shape = (max(1, settings.tokens // seqlen), seqlen, model.hidden)
        self.x = torch.randn(shape, **where).requires_grad_()
        self.dout = torch.randn(shape, **where)
        step = torch.arange(0, model.head_dim, 2, device=device) / model.head_dim
        angles = torch.arange(seqlen, device=device)[:, None] * model.rope_theta**-step
        angles = torch.cat((angles, angles), -1)[:, None]
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0] * self.x.shape[1]

    def step(self, attend: Function) -> Tensor:
        """A forward and a backward pass. The gradients of the previous step are dropped first."""
        self.x.grad = None
        self.layers.zero_grad(set_to_none=True)
        y = self.x
        for layer in self.layers:
            y = layer(y, attend, self.cos, self.sin)
        y.backward(self.dout)
        return y.detach()

    def results(self, attend: Function) -> list[Tensor]:
        """The output, and the gradients of the input and of the first layer's projection to q."""
        out = self.step(attend)
        weight: Any = next(self.layers.parameters())
        return [out, self.x.grad, weight.grad]


# ---- measuring
# -------------------------------------------------------------------------------------------------------


def kernels(settings: Settings, tools: Tools) -> list[LaunchKey]:
    """The kernels of cute_flash, recorded in steps of a model with one layer."""
    one_layer = replace(settings, model=replace(settings.model, layers=1))
    stacks = [Stack(one_layer, seqlen, tools.device) for seqlen in settings.lengths]
    ours = [one for one in attentions(tools) if one.is_ours and one.unavailable(tools.device) is None]
    return needed_kernels(TimedCall(partial(stack.step, one.make()), one.context) for stack in stacks for one in ours)


def measure_length(seqlen: int, settings: Settings, tools: Tools) -> Record:
    tools.release()
    stack = Stack(settings, seqlen, tools.device)
    reasons = {one.name: one.unavailable(tools.device) for one in attentions(tools)}
    here = [one for one in attentions(tools) if not reasons[one.name]]
    calls = {one.name: TimedCall(partial(stack.results, one.make()), one.context) for one in here}
    results, failures = attempt_each(calls, tools.events)
    failures |= {name: f"not available: {reason}" for name, reason in reasons.items() if reason}
    wanted: list[Tensor] = next(iter(results.values()), [])
    differences = {name: relative_difference(found, wanted) for name, found in results.items()}
    wrong = {name: difference for name, difference in differences.items() if difference > AGREEMENT}
    failures |= {name: f"not timed: {difference:.2g} away from {OURS}" for name, difference in wrong.items()}
    results.clear()
    timed_calls = {
        one.name: TimedCall(partial(stack.step, one.make()), one.context) for one in here if one.name not in failures
    }
    measured = measure(timed_calls, tools.events, settings.rounds, settings.ms)
    return {
        "seqlen": seqlen,
        "batch": stack.x.shape[0],
        "sides": {
            name: {"tokens_per_s": 1e3 * stack.num_tokens / samples.median_ms, **samples.as_dict()}
            for name, samples in measured.samples.items()
        },
        "differences": differences,
        "failures": failures | measured.errors,
    }


def steps(settings: Settings, tools: Tools) -> list[Step]:
    return [
        Step("cells", f"S = {seqlen}", partial(measure_length, seqlen, settings, tools)) for seqlen in settings.lengths
    ]


# ---- report
# -------------------------------------------------------------------------------------------------------


def table(record: Record) -> Table:
    """Tokens per second, and the time of a step; the fastest at the first length comes first."""
    cells = record["cells"]
    names: dict[str, None] = {}
    for cell in cells:
        names |= dict.fromkeys(sorted(cell["sides"], key=lambda name: cell["sides"][name]["ms"]))
    rows = []
    for name in names:
        texts = []
        for cell in cells:
            side = cell["sides"].get(name)
            texts += [f"{side['tokens_per_s']:,.0f}", f"{side['ms']:.1f}"] if side else ["-", "-"]
        rows.append((name, *texts))
    columns = [text for cell in cells for text in (f"S = {cell['seqlen']}, tokens/s", "ms")]
    return Table("", ("attention through", *columns), tuple(rows))


def _best(record: Record, cell: Record, is_ours: bool) -> tuple[str, float] | None:
    sides = {name: side["tokens_per_s"] for name, side in cell["sides"].items() if (name in record["ours"]) == is_ours}
    name = max(sides, key=lambda name: sides[name], default=None)
    return None if name is None else (name, sides[name])


def summary(record: Record) -> str:
    """For each length, the speed of the slowest and the fastest integration over the fastest other library."""
    texts = []
    for cell in record["cells"]:
        ours, other = _best(record, cell, True), _best(record, cell, False)
        if ours is None or other is None:
            continue
        slowest = min(side["tokens_per_s"] for name, side in cell["sides"].items() if name in record["ours"])
        texts.append(
            f"{slowest / other[1]:.3f} to {ours[1] / other[1]:.3f} × at S = {cell['seqlen']} (the other is {other[0]})"
        )
    return (
        f"Tokens per second of cute_flash over those of the fastest other library: {'; '.join(texts)}."
        if texts
        else "No other library was measured."
    )


STUDY = Study(
    name="training",
    help=f"training steps of a Llama; about {EXPECTED_SECONDS} s on an H200",
    examples=("--out training.json", "--dry-run  # a small model on the CPU"),
    settings=Settings,
    kernels=kernels,
    method=METHOD,
    parts=lambda settings, tools: {"ours": [one.name for one in attentions(tools) if one.is_ours], "cells": []},
    steps=steps,
    tables=lambda record: [table(record)],
    notes=lambda record: [summary(record)],
    failures=lambda record: failures_in(record["cells"], lambda cell: f"S = {cell['seqlen']}"),
    ours=[one.name for one in ATTENTIONS if one.is_ours],
    has_own_file=True,
    small=SMALL,
)
