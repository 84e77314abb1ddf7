"""`python -m profiling.studies.standard_case`: calls that Nsight Compute counts, of both implementations.

One process makes all calls, because starting a process takes longer than the calls. Between the profiler's start and
stop, each case has two parts, each ended by a marker kernel: the call itself, and a read of a buffer that is larger
than L2. The read evicts what the call left in L2, so that all bytes that the call wrote are counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from profiling.measure.accuracy import random_dout, random_inputs
from profiling.measure.options import int_list, name_list
from profiling.measure.shapes import DTYPES, Shape
from profiling.measure.study import Tools
from profiling.studies.standard import DIRECTIONS, DTYPE, PEERS, Settings

# A part of the symbol of `torch.cuda._sleep`'s kernel, which no attention runs.
MARKER = "spin_kernel"
SCRATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    peer: str
    direction: str
    shape: Shape

    @property
    def key(self) -> str:
        """The key of the cell in the record of `python -m profiling standard`."""
        return f"{self.direction}-{self.shape.id}"


def cases(settings: Settings) -> list[Case]:
    """All cases, in the order in which they are profiled."""
    return [
        Case(peer.name, direction, shape) for shape in settings.shapes() for direction in DIRECTIONS for peer in PEERS
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, BYTES_SETTINGS
    add("--lengths", type=int_list, default=defaults.lengths, metavar="LIST", help="queries and keys")
    add("--head-dims", type=int_list, default=defaults.head_dims, metavar="LIST", help="head dims")
    add("--masks", type=name_list, default=defaults.masks, metavar="LIST", help="of full and causal")


BYTES_SETTINGS = Settings(lengths=(1024, 4096, 16384), masks=("full",))


def _prepare(case: Case, seed: int) -> Callable[[], Any]:
    device, dtype, shape = torch.device("cuda"), DTYPES[DTYPE], case.shape
    peer = next(one for one in PEERS if one.name == case.peer)
    q, k, v = random_inputs(shape, dtype, device, seed)
    if case.direction == "fwd":
        return peer.prepare(q, k, v, shape.causal)
    return peer.prepare_backward(q, k, v, random_dout(shape, dtype, device, seed), shape.causal)


@torch.no_grad()
def run(settings: Settings) -> None:
    scratch = torch.ones(SCRATCH_BYTES // 4, device="cuda")
    for case in cases(settings):
        call: Callable[[], Any] = lambda: None  # noqa: E731
        try:
            call = _prepare(case, settings.seed)
            # Compiles, loads and allocates.
            call()
        except Exception as error:
            print(f"{case.peer} {case.key}: {error}", file=sys.stderr)
        # L2 is full of clean lines when the call starts.
        scratch.sum()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        try:
            call()
        except Exception as error:
            print(f"{case.peer} {case.key}: {error}", file=sys.stderr)
        torch.cuda._sleep(1)
        scratch.sum()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del call
        Tools().release()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.studies.standard_case", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    run(Settings(args.lengths, args.head_dims, args.masks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
