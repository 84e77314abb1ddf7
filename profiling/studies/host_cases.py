"""The cases of the host benchmark: the call, the backends to compare with, and the goal of its host time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cute_flash
from profiling.measure.accuracy import random_inputs
from profiling.measure.options import option
from profiling.measure.shapes import DTYPES, Shape
from profiling.measure.study import Record
from profiling.measure.timing import TimedCall
from profiling.peers.cute_flash import OPTIONS
from profiling.peers.peer import KERNELS, gradients_of

SHAPE = Shape(batch=2, heads=8, heads_kv=8, seqlen=512, head_dim=64, causal=False)
# With at most 5 launches a call, a loop never fills the launch queue of 1024.
CALLS, REPEATS, PROCESSES = 100, 10, 5
# Relative change of the ratio to SDPA between two runs that counts as noise.
NOISE = 0.05
# One token of one sequence, and its K/V cache: with `attn`, and with `attn_decode`.
ONE_TOKEN = ("few_queries", "decode")
ONE_TOKEN_SHAPE = Shape(batch=1, heads=32, heads_kv=8, seqlen=4096, head_dim=128, causal=False)
SDPA = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Goal:
    """Upper bounds of a case's host time; None: no such goal."""

    us: float | None = None
    over_floor_us: float | None = None
    of_sdpa: float | None = None  # as a multiple of the fastest backend's time
    of_plain: float | None = None  # as a multiple of the plain call's time
    is_as_base: bool = False  # the ratio to SDPA may exceed that of an earlier run by at most NOISE

    def bounds(self, base_ratio: float | None) -> dict[str, float]:
        """The bounds by figure; without an earlier run, `is_as_base` adds none."""
        bounds = {
            "us": self.us,
            "over_floor_us": self.over_floor_us,
            "ratio": self.of_sdpa,
            "over_plain": self.of_plain,
        }
        if self.is_as_base and base_ratio is not None:
            bounds["ratio"] = base_ratio * (1 + NOISE)
        return {name: bound for name, bound in bounds.items() if bound is not None}


@dataclass(frozen=True)
class Case:
    feature: str = "plain"  # of FEATURES, or "score_mod", "varlen", "few_queries" or "decode"
    direction: str = "fwd"  # "fwd", "train" or "bwd"
    watcher: str = ""  # of WATCHERS: a mode or profiler that is active during the call; "": none
    goal: Goal = Goal()

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.feature, self.direction, self.watcher)))

    @property
    def sdpa(self) -> Mapping[str, SDPBackend]:
        """The backends to compare with; none for features, which SDPA does not have."""
        return SDPA if self.feature in ("plain", *ONE_TOKEN) else {}

    @property
    def plain(self) -> str:
        """The plain case of the same direction."""
        return f"plain-{self.direction}"


class PassingDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PassingFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


Context = Callable[[], AbstractContextManager[Any]]
WATCHERS: dict[str, Context] = {
    # Without CUDA activities: CUPTI would stay loaded and slow down the launches of the other calls.
    "profiler": partial(torch.profiler.profile, activities=[torch.profiler.ProfilerActivity.CPU]),
    "dispatch_mode": PassingDispatchMode,
    "function_mode": PassingFunctionMode,
}
# Feature -> (heads, length, device) -> keyword arguments of `attn`.
FEATURES: dict[str, Callable[[int, int, torch.device], dict[str, Any]]] = {
    **{name: OPTIONS[name] for name in ("plain", "softcap", "alibi", "sinks", "dropout", "bias")},
    "max_logit": lambda heads, seqlen, device: {"return_max_logit": True},
    "mask_mod": lambda heads, seqlen, device: {"mask_mod": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx},
    "window": lambda heads, seqlen, device: {"window": (128, 128)},
}
# Feature -> the torch operation that makes an operand of its kernel. The floor includes it.
MADE_BY_TORCH: dict[str, Callable[[Shape, torch.device], Callable[[], Tensor]]] = {
    "dropout": lambda shape, device: partial(torch.randint, (1 << 63) - 1, (2,), dtype=torch.int64, device=device),
    "max_logit": lambda shape, device: partial(torch.full, (shape.heads,), -math.inf, device=device),
}
# Feature -> the goal of its ratio to the plain call.
OF_PLAIN = {"softcap": 1.1, "alibi": 1.3, "score_mod": 1.3, "dropout": 1.6}
CASES = (
    Case(goal=Goal(over_floor_us=6.0, of_sdpa=1.0)),
    Case(direction="train", goal=Goal(of_sdpa=1.05)),
    Case(direction="bwd", goal=Goal(of_sdpa=1.15)),
    Case("few_queries", goal=Goal(of_sdpa=1.1)),
    Case("decode", goal=Goal(us=20.0)),
    *(
        Case(feature, goal=Goal(over_floor_us=10.0, of_plain=OF_PLAIN.get(feature)))
        for feature in (*list(FEATURES)[1:], "score_mod")
    ),
    *(Case(feature, direction) for feature in ("softcap", "score_mod") for direction in ("train", "bwd")),
    *(Case("varlen", direction) for direction in ("fwd", "bwd")),
    *(Case(direction="train", watcher=watcher, goal=Goal(is_as_base=True)) for watcher in WATCHERS),
)

CASE_NAMES = tuple(case.name for case in CASES)


@dataclass(frozen=True)
class Settings:
    cases: tuple[str, ...] = option(CASE_NAMES, choices=CASE_NAMES)
    processes: int = option(PROCESSES, "fresh processes")
    calls: int = option(CALLS, "calls in a loop")
    repeats: int = option(REPEATS, "loops in a process")
    kernels: str = option("auto", "kernel family of cute_flash", choices=KERNELS)
    base: str | None = option(None, "JSON of an earlier run, for the goals that compare with it", metavar="FILE")
    start: bool = option(False, "measure the import and the first calls too")
    pack: str | None = option(None, "with --start: a wheel of kernels to start with", metavar="WHEEL")
    shape: Shape = SHAPE
    one_token_shape: Shape = ONE_TOKEN_SHAPE
    device: str = "cuda"

    def earlier(self) -> Record:
        """The record of the earlier run, or an empty one."""
        record: Record = json.loads(Path(self.base).read_text()) if self.base else {}
        return record

    def chosen(self) -> list[Case]:
        return [case for name in dict.fromkeys(self.cases) for case in CASES if case.name == name]


def _forward(feature: str, shape: Shape, device: torch.device) -> Callable[..., Any]:
    if feature == "score_mod":
        shift = 0.5
        # A new function in every call, as in the forward of a module.
        return lambda q, k, v: cute_flash.attn(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score + shift)
    if feature == "varlen":
        steps = range(0, (shape.batch + 1) * shape.seqlen, shape.seqlen)
        offsets = torch.tensor(steps, dtype=torch.int32, device=device)
        return partial(cute_flash.attn_varlen, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    return partial(cute_flash.attn, **FEATURES[feature](shape.heads, shape.seqlen, device))


@contextmanager
def _entered(*contexts: Context) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def _one_token(case: Case, shape: Shape, device: torch.device, is_sdpa: bool) -> Callable[[], Any]:
    """The call of one token over a contiguous cache of `shape.seqlen` keys."""
    q, k, v = random_inputs(shape, DTYPES["bf16"], device, seed=0)
    q = q[:, :, :1].contiguous()
    if is_sdpa:
        return partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, enable_gqa=True)
    if case.feature == "few_queries":
        return partial(cute_flash.attn, q, k, v)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    lengths = torch.full((shape.batch,), shape.seqlen, dtype=torch.int32, device=device)
    return partial(cute_flash.attn_decode, q, k, v, cache_seqlens=lengths)


def timed_call(case: Case, settings: Settings, backend: SDPBackend | None = None) -> TimedCall:
    """The call of a case, by cute_flash or by a backend of SDPA, on tensors of its own."""
    device = torch.device(settings.device)
    contexts: list[Context] = [WATCHERS[case.watcher]] if case.watcher else []
    if backend is not None:
        contexts.append(partial(sdpa_kernel, backend))
    if case.feature in ONE_TOKEN:
        call = _one_token(case, settings.one_token_shape, device, backend is not None)
        return TimedCall(call, partial(_entered, torch.no_grad, *contexts))
    inputs = list(random_inputs(settings.shape, DTYPES["bf16"], device, seed=0))
    if case.feature == "varlen":
        inputs = [x.transpose(1, 2).flatten(0, 1) for x in inputs]
    forward: Callable[..., Any] = torch.nn.functional.scaled_dot_product_attention
    if backend is None:
        forward = _forward(case.feature, settings.shape, device)
    if case.direction == "fwd":
        return TimedCall(partial(forward, *inputs), partial(_entered, torch.no_grad, *contexts))
    context = partial(_entered, *contexts)
    if case.direction == "train":
        return TimedCall(partial(forward, *(x.requires_grad_() for x in inputs)), context)
    with context():
        return TimedCall(gradients_of(forward, inputs).call, context)
