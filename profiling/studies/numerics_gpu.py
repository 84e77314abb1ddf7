"""Errors of the GPU kernels against fp64 beside torch's SDPA: fp16, bf16 and fp32, by length and distribution.

Each result is compared on the sample of `oracles.py`. A peer that has no kernel for a dtype is recorded as absent,
with its message.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cute_flash.planning.launch import LaunchKey
from profiling.measure.launches import needed_kernels
from profiling.measure.options import LIMIT_S
from profiling.measure.shapes import Shape
from profiling.measure.study import Record, Step, Study, Tools
from profiling.measure.timing import attempt_each
from profiling.peers.cute_flash import our_peer
from profiling.peers.directions import DIRECTIONS, calls_of
from profiling.peers.peer import Peer
from profiling.peers.sdpa import sdpa_peer
from profiling.studies import numerics, numerics_report
from profiling.studies.numerics import CPU_DTYPES as DTYPES
from profiling.studies.numerics import DISTRIBUTIONS, Sizes

# `sdpa-math` is unfused; it computes 16-bit inputs in fp32.
PEERS: tuple[Peer, ...] = (
    our_peer(),
    sdpa_peer("sdpa-flash", SDPBackend.FLASH_ATTENTION),
    sdpa_peer("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
    sdpa_peer("sdpa-math", SDPBackend.MATH),
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
    limit_s: float = LIMIT_S(50.0)

    def shape(self, seqlen: int) -> Shape:
        return Shape(1, self.heads, self.heads, seqlen, self.head_dim, causal=False)


SMALL = Settings((16, 32), (16,), heads=1, head_dim=16)


# The errors of a result; None if it is not finite, or absent.
ERRORS = ("relative", "max_abs", "max_exact")


@torch.no_grad()
def measure_case(direction: str, case: tuple[str, str, int], settings: Settings, tools: Tools) -> list[Record]:
    """The errors of all peers: of the output, or of the gradients. "absent": why there is no result."""
    name, distribution, seqlen = case
    this, shape = DIRECTIONS[direction], settings.shape(seqlen)
    inputs = this.inputs(shape, DTYPES[name], tools.device, settings.seed, distribution)
    oracles = this.oracles(inputs, False)

    def results_of(peer: Peer) -> dict[str, Tensor]:
        with peer.context():
            results = this.named(peer, this.prepare(peer, inputs, False)())
        tools.events.synchronize()
        return results

    results, absent = attempt_each({peer.name: partial(results_of, peer) for peer in PEERS}, tools.events)
    found = []
    for peer, output in product((peer.name for peer in PEERS), oracles):
        errors: Record = dict.fromkeys(ERRORS)
        if peer in results:
            exact = float(oracles[output].exact.abs().max())
            errors = {**asdict(oracles[output].errors(results[peer][output])), "max_exact": exact}
        place = {"dtype": name, "distribution": distribution, "seqlen": seqlen, "output": output}
        found.append({"provider": peer, **place, **errors, "absent": absent.get(peer)})
    return found


def steps(settings: Settings, tools: Tools) -> list[Step]:
    return [
        Step(
            "records", f"{title}, {', '.join(map(str, case))}", partial(measure_case, direction, case, settings, tools)
        )
        for direction, title, lengths in (("fwd", "out", settings.lengths), ("bwd", "gradients", settings.grad_lengths))
        for seqlen in lengths
        for case in product(settings.dtypes, settings.distributions, (seqlen,))
    ]


def kernels(settings: Settings, tools: Tools) -> list[LaunchKey]:
    lengths = {"fwd": settings.lengths, "bwd": settings.grad_lengths}
    return needed_kernels(
        call
        for name in settings.dtypes
        for direction in lengths
        for call in calls_of(
            PEERS, [settings.shape(n) for n in lengths[direction]], (direction,), DTYPES[name], tools.device
        )
    )


# The command: `--cpu` measures the online softmax, `--gpu` the kernels.
CPU_STUDY = Study(
    name="numerics",
    help="",
    examples=(),
    settings=Sizes,
    parts=lambda settings, tools: {"records": []},
    steps=numerics.steps,
    tables=lambda record: numerics_report.cpu_tables(record["records"]),
    has_own_file=True,
    small=numerics.SMALL,
    runs_on="cpu",
)
GPU_STUDY = Study(
    name="numerics",
    help="errors against fp64 by length, dtype and distribution",
    examples=("--cpu", "--gpu", "--gpu --dry-run  # small shapes on the CPU"),
    settings=Settings,
    kernels=kernels,
    parts=lambda settings, tools: {"records": []},
    steps=steps,
    tables=lambda record: [numerics_report.gpu(record["records"])],
    notes=lambda record: [f"absent: {line}" for line in numerics_report.absent(record["records"])],
    has_own_file=True,
    small=SMALL,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cpu", action="store_true", help="the online softmax on the CPU: about two minutes")
    where.add_argument("--gpu", action="store_true", help="the kernels beside torch's SDPA: less than a minute")
    GPU_STUDY.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return CPU_STUDY.run(args) if args.cpu else GPU_STUDY.run(args)


COMMAND = replace(GPU_STUDY.command, add_arguments=add_arguments, run=run)
