"""Errors of the GPU kernels against fp64 beside torch's SDPA: fp16, bf16 and fp32, by length and distribution.

Each result is compared on the sample of `oracles.py`. A provider that has no kernel for a dtype is recorded as absent,
with its message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cute_flash.planning.plan import CompileKey, plan_backward, plan_forward
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.problem import Problem
from profiling.measure.accuracy import Oracle, random_dout
from profiling.measure.oracles import GRADIENTS, backward_oracles, forward_oracle
from profiling.measure.shapes import Shape
from profiling.measure.timing import describe
from profiling.peers.cute_flash import CuteFlash
from profiling.peers.peer import Peer
from profiling.peers.sdpa import Sdpa
from profiling.studies.numerics import CPU_DTYPES as DTYPES
from profiling.studies.numerics import DISTRIBUTIONS, draw

# `sdpa-math` is unfused; it computes 16-bit inputs in fp32.
PEERS: tuple[Peer, ...] = (
    CuteFlash(),
    Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION),
    Sdpa("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
    Sdpa("sdpa-math", SDPBackend.MATH),
)


@dataclass(frozen=True)
class Settings:
    lengths: tuple[int, ...] = (512, 2048, 8192, 16384)
    grad_lengths: tuple[int, ...] = (2048,)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    distributions: tuple[str, ...] = DISTRIBUTIONS
    heads: int = 4
    head_dim: int = 128
    seed: int = 0
    limit_s: float = 60.0

    def shape(self, seqlen: int) -> Shape:
        return Shape(1, self.heads, self.heads, seqlen, self.head_dim, causal=False)

    def keys(self, spec: ArchSpec) -> list[CompileKey]:
        """The kernels of cute_flash, to compile them in parallel before the first call."""
        keys: dict[CompileKey, None] = {}
        for name in self.dtypes:
            dtype = str(DTYPES[name]).removeprefix("torch.")
            for plan, lengths in ((plan_forward, self.lengths), (plan_backward, self.grad_lengths)):
                for seqlen in lengths:
                    problem = Problem(1, self.heads, self.heads, seqlen, seqlen, self.head_dim, dtype)
                    try:
                        keys |= dict.fromkeys(plan(problem, spec).launches)
                    except ValueError:
                        # No kernel: the call raises an error, which the study records.
                        continue
        return list(keys)


SMALL = Settings((16, 32), (16,), heads=1, head_dim=16)


@dataclass(frozen=True)
class Result:
    provider: str
    dtype: str
    distribution: str
    seqlen: int
    output: str  # "out", "dq", "dk" or "dv"
    relative: float | None  # ‖out - exact‖ / ‖exact‖, Frobenius; None if it is not finite, or absent
    max_abs: float | None  # largest |out - exact|
    max_exact: float | None
    absent: str | None = None  # why there is no result


def _compare(
    case: tuple[str, str, int],
    outputs: Sequence[str],
    oracles: dict[str, Oracle],
    calls: Mapping[str, Callable[[], Any]],
) -> Iterator[Result]:
    """The results of all providers in one case: `calls` return the outputs."""
    for provider, call in calls.items():
        try:
            results = call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            yield from (Result(provider, *case, name, None, None, None, describe(error)) for name in outputs)
            continue
        for name, tensor in zip(outputs, results, strict=True):
            errors, exact = oracles[name].errors(tensor), float(oracles[name].exact.abs().max())
            yield Result(provider, *case, name, errors.relative, errors.max_abs, exact)


def _inputs(settings: Settings, distribution: str, seqlen: int, name: str, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(settings.seed)
    shape = settings.shape(seqlen)
    size = (shape.batch, shape.heads, shape.seqlen, shape.head_dim)
    return [draw(distribution, size, generator).to(DTYPES[name]) for _ in range(3)]


def _forward(settings: Settings, case: tuple[str, str, int], device: torch.device) -> Iterator[Result]:
    name, distribution, seqlen = case
    q, k, v = _inputs(settings, distribution, seqlen, name, device)

    def call(provider: Peer) -> tuple[Tensor]:
        with provider.context():
            return (provider.prepare(q, k, v, False)(),)

    calls = {one.name: partial(call, one) for one in PEERS}
    yield from _compare(case, ("out",), {"out": forward_oracle(q, k, v, False)}, calls)


def _backward(settings: Settings, case: tuple[str, str, int], device: torch.device) -> Iterator[Result]:
    name, distribution, seqlen = case
    q, k, v = _inputs(settings, distribution, seqlen, name, device)
    dout = random_dout(settings.shape(seqlen), DTYPES[name], device, settings.seed)

    def call(provider: Peer) -> tuple[Tensor, ...]:
        with provider.context():
            return provider.prepare_backward(q, k, v, dout, False)()

    calls = {one.name: partial(call, one) for one in PEERS}
    yield from _compare(case, GRADIENTS, backward_oracles(q, k, v, dout, False), calls)


def run_gpu(
    settings: Settings,
    device: torch.device,
    done: Callable[[str], None],
    save: Callable[[list[dict[str, Any]], list[str]], None],
) -> tuple[list[dict[str, Any]], list[str]]:
    """All cases; returns the records and the cases that were left out because the time was up.

    `save` gets both after every case.
    """
    end = time.monotonic() + settings.limit_s
    records: list[dict[str, Any]] = []
    left_out: list[str] = []
    cases = [
        (study, (name, distribution, seqlen))
        for study, lengths in ((_forward, settings.lengths), (_backward, settings.grad_lengths))
        for seqlen in lengths
        for name in settings.dtypes
        for distribution in settings.distributions
    ]
    with torch.no_grad():
        for study, case in cases:
            title = f"{'out' if study is _forward else 'gradients'}, {', '.join(map(str, case))}"
            if time.monotonic() > end:
                left_out.append(title)
            else:
                records += [asdict(result) for result in study(settings, case, device)]
            save(records, left_out)
            done(title)
    return records, left_out
