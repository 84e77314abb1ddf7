"""`python -m profiling.counters.ncu_case`: one warm launch of one kernel between the profiler's start and stop.

`python -m profiling ncu` runs it under ncu. A kernel with another layout of shared memory is profiled only if its
results have the same bits as those of the default layout.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_flash.planning.launch import LaunchKey
from cute_flash.planning.plan import Plan, plan_backward, plan_forward
from cute_flash.reference import plain_args
from cute_flash.runtime import launcher
from cute_flash.smem.tile import HOPPER_VARIANTS, VARIANTS
from cute_flash.spec import arch
from cute_flash.spec.arch import ArchSpec
from profiling.measure.accuracy import nan_in_new_memory
from profiling.measure.shapes import DTYPES, MASKS, Shape
from profiling.tune.trial import forward_of

# The shared-memory layouts that each kernel can have; the first is the default.
LAYOUTS = {"fwd-sm80": VARIANTS, "fwd-sm90": HOPPER_VARIANTS, "bwd-sm80": VARIANTS[:1], "bwd-sm90": HOPPER_VARIANTS[:1]}


@dataclass(frozen=True)
class Case:
    kernel: str
    layout: str
    shape: Shape
    dtype: str = "bf16"

    @property
    def id(self) -> str:
        return f"{self.kernel}-{self.layout}-{self.shape.id}"

    @property
    def direction(self) -> str:
        return self.kernel.partition("-")[0]

    @property
    def family(self) -> str:
        return self.kernel.partition("-")[2]

    @property
    def symbol(self) -> str:
        """The prefix of the kernel's symbol."""
        return f"cute_flash_{self.direction}_{self.family}_"

    def plan(self, spec: ArchSpec) -> Plan:
        problem = self.shape.problem(self.dtype)
        if self.direction == "bwd":
            return plan_backward(problem, spec, family=self.family)
        tile = plan_forward(problem, spec, self.family).tile
        return plan_forward(problem, spec, self.family, tile=replace(tile, layout=self.layout))

    def keys(self, spec: ArchSpec) -> list[LaunchKey]:
        """The kernels that the case's process launches, including those of the default forward."""
        default = replace(self, kernel=f"fwd-{self.family}", layout=LAYOUTS[self.kernel][0])
        return [*default.plan(spec).host_calls, *self.plan(spec).host_calls]


_ID = re.compile(
    r"(?P<kernel>(?:fwd|bwd)-sm\d+)-(?P<layout>\w+)-d(?P<head_dim>\d+)-(?P<mask>\w+)-s(?P<seqlen>\d+)"
    r"-b(?P<batch>\d+)h(?P<heads>\d+)(?:kv(?P<heads_kv>\d+))?"
)


def case_of(case_id: str, dtype: str = "bf16") -> Case:
    """The case of an id, which does not name the dtype."""
    match = _ID.fullmatch(case_id)
    if match is None:
        raise ValueError(f"{case_id}: not the name of a profiled case")
    batch, heads, seqlen, head_dim = (int(match[name]) for name in ("batch", "heads", "seqlen", "head_dim"))
    heads_kv = int(match["heads_kv"] or heads)
    shape = Shape(batch, heads, heads_kv, seqlen, head_dim, match["mask"] == MASKS[1])
    return Case(match["kernel"], match["layout"], shape, dtype)


def dtype_of(symbol: str) -> str:
    """The dtype of a kernel, by its symbol."""
    return "bf16" if "_bfloat16_" in symbol else "fp16"


def measured_cases(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases of an `ncu.json` that have counters, by kernel, head dim and layout, the default layout first."""

    def order(case: dict[str, Any]) -> tuple[int, int, int, int]:
        kernel, shape = case["kernel"], case["shape"]
        size, layout = shape["batch"] * shape["heads"] * shape["seqlen"], LAYOUTS[kernel].index(case["layout"])
        return list(LAYOUTS).index(kernel), -shape["head_dim"], size, layout

    return sorted((case for case in record["cases"].values() if case["measured"]), key=order)


# A tensor has 134 MB at D = 128, more than twice the L2 of an H200: outputs reach DRAM before the kernel ends.
BEYOND_L2 = {"batch": 8, "heads": 16, "seqlen": 4096}


def is_beyond_l2(case: dict[str, Any]) -> bool:
    """Whether a case of an `ncu.json` has the shape of `--beyond-l2`."""
    return all(case["shape"][name] == value for name, value in BEYOND_L2.items())


def _inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout."""
    torch.manual_seed(0)
    shape = case.shape
    q, kv = ((shape.batch, heads, shape.seqlen, shape.head_dim) for heads in (shape.heads, shape.heads_kv))
    return tuple(torch.randn(size, device="cuda", dtype=DTYPES[case.dtype]) for size in (q, kv, kv, q))


def _forward(case: Case, spec: ArchSpec) -> Callable[[], tuple[torch.Tensor, ...]]:
    q, k, v, _ = _inputs(case)
    forward = forward_of(case.plan(spec), q.device)
    return lambda: forward(q, k, v)


def _backward(case: Case) -> Callable[[], tuple[torch.Tensor, ...]]:
    q, k, v, dout = _inputs(case)
    args = plain_args(q, case.shape.problem(case.dtype).band)._replace(kernel_family=case.family)
    out, lse, _ = launcher.forward(q, k, v, args)
    return lambda: launcher.backward(dout, None, q, k, v, out, lse, args)[:3]


def _check(case: Case, spec: ArchSpec, results: Sequence[torch.Tensor]) -> None:
    default = LAYOUTS[case.kernel][0]
    if not all(torch.isfinite(x).all() for x in results):
        raise SystemExit(f"{case.id}: an element of the result is not finite")
    if case.layout != default:
        expected = _forward(replace(case, layout=default), spec)()
        if not all(map(torch.equal, results, expected)):
            raise SystemExit(f"{case.id}: the result differs in its bits from that of the layout {default!r}")


@torch.no_grad()
def run(case: Case) -> None:
    spec = arch.detect(torch.cuda.current_device())
    call: Callable[[], Sequence[torch.Tensor]]
    call = _forward(case, spec) if case.direction == "fwd" else _backward(case)
    with nan_in_new_memory():
        results = call()
    _check(case, spec, results)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.counters.ncu_case", description=__doc__)
    parser.add_argument("case", help="the id of a case, such as fwd-sm80-plain-d128-full-s2048-b2h8")
    parser.add_argument("dtype", choices=DTYPES)
    args = parser.parse_args(argv)
    run(case_of(args.case, args.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
