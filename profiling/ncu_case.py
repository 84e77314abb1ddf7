"""`python -m profiling.ncu_case`: one warm launch of one kernel between the profiler's start and stop.

Run by `python -m profiling ncu` under ncu. A kernel with another layout of shared memory must give the bits
of the default one before it is profiled: the layout moves data, and changes none.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from cute_flash import ops
from cute_flash.planning.plan import BwdPlan, CompileKey, Plan, bwd_plan, plan
from cute_flash.smem.tile import HOPPER_VARIANTS, VARIANTS
from cute_flash.spec import arch
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.family import use_kernels
from profiling.suites import DTYPES, MASKS, Shape
from profiling.trial import launch_plan

# What each kernel can lay out in shared memory; the first is the default.
LAYOUTS = {
    "fwd-sm80": VARIANTS,
    "fwd-sm90": HOPPER_VARIANTS,
    "bwd-sm80": VARIANTS[:1],
    "bwd-sm90": HOPPER_VARIANTS[:1],
}


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
        """What the name of the kernel begins with, on the GPU."""
        return f"cute_flash_{self.direction}_{self.family}_"

    def plan(self, spec: ArchSpec) -> Plan:
        """Of a forward pass."""
        with use_kernels(self.family):
            chosen = plan(self.shape.problem(self.dtype), spec)
        return replace(chosen, tile=replace(chosen.tile, layout=self.layout))

    def bwd_plan(self, spec: ArchSpec) -> BwdPlan:
        with use_kernels(self.family):
            return bwd_plan(self.shape.problem(self.dtype), spec)

    def keys(self, spec: ArchSpec) -> list[CompileKey]:
        """The kernels that the process of the case launches."""
        default = replace(self, kernel=f"fwd-{self.family}", layout=LAYOUTS[self.kernel][0]).plan(spec).key
        if self.direction == "fwd":
            return [default, self.plan(spec).key]
        backward = self.bwd_plan(spec)
        after = [] if backward.after is None else [backward.after]
        return [default, backward.before(False), backward.main, *after]

    @property
    def arguments(self) -> list[str]:
        """Of this module."""
        given = {**asdict(self.shape), "kernel": self.kernel, "layout": self.layout, "dtype": self.dtype}
        given["mask"] = MASKS[given.pop("causal")]
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


_ID = re.compile(
    r"(?P<kernel>(?:fwd|bwd)-sm\d+)-(?P<layout>\w+)-d(?P<head_dim>\d+)-(?P<mask>\w+)-s(?P<seqlen>\d+)"
    r"-b(?P<batch>\d+)h(?P<heads>\d+)(?:kv(?P<heads_kv>\d+))?"
)


def case_of(case_id: str, symbol: str) -> Case:
    """The case with that id; its dtype is in the name of the kernel on the GPU."""
    match = _ID.fullmatch(case_id)
    if match is None:
        raise ValueError(f"{case_id}: not the name of a profiled case")
    batch, heads, seqlen, head_dim = (int(match[name]) for name in ("batch", "heads", "seqlen", "head_dim"))
    heads_kv = int(match["heads_kv"] or heads)
    shape = Shape(batch, heads, heads_kv, seqlen, head_dim, match["mask"] == MASKS[1])
    dtype = "bf16" if "_bfloat16_" in symbol else "fp16"
    return Case(match["kernel"], match["layout"], shape, dtype)


def add_shape(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch", type=int, default=2, help="default: %(default)s")
    add("--heads", type=int, default=8, help="of queries (default: %(default)s)")
    add("--heads-kv", type=int, help="of keys (default: as many)")
    add("--seqlen", type=int, default=2048, help="of queries and keys (default: %(default)s)")
    add("--head-dim", type=int, default=128, help="default: %(default)s")
    add("--mask", choices=MASKS, default=MASKS[0], help="default: %(default)s")
    add("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")


def shape_of(args: argparse.Namespace) -> Shape:
    heads_kv = args.heads if args.heads_kv is None else args.heads_kv
    causal = args.mask == MASKS[1]
    return Shape(args.batch, args.heads, heads_kv, args.seqlen, args.head_dim, causal)


def _draw(case: Case) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shape = case.shape
    sizes = [(shape.batch, heads, shape.seqlen, shape.head_dim) for heads in (shape.heads, shape.heads_kv)]
    drawn = (sizes[0], sizes[1], sizes[1], sizes[0])
    return tuple(torch.randn(size, device="cuda", dtype=DTYPES[case.dtype]) for size in drawn)


def _forward(case: Case, spec: ArchSpec) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    q, k, v, _ = _draw(case)
    launch = launch_plan(case.plan(spec))

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full_like(q, torch.nan)
        lse = torch.full(q.shape[:3], torch.nan, dtype=torch.float32, device=q.device)
        launch(q, k, v, out, lse)
        return out, lse

    return call


def _backward(case: Case) -> Callable[[], tuple[torch.Tensor, ...]]:
    q, k, v, dout = _draw(case)
    scale, right = case.shape.head_dim**-0.5, 0 if case.shape.causal else None
    with use_kernels(case.family):
        out, lse = ops.fwd(q, k, v, scale, None, right)

    def call() -> tuple[torch.Tensor, ...]:
        with use_kernels(case.family):
            return ops.bwd(dout, None, q, k, v, out, lse, scale, None, right)

    return call


def _check(case: Case, spec: ArchSpec, results: Sequence[torch.Tensor]) -> None:
    default = LAYOUTS[case.kernel][0]
    if not all(torch.isfinite(x).all() for x in results):
        raise SystemExit(f"{case.id}: something in the result is not finite")
    if case.layout != default:
        expected = _forward(replace(case, layout=default), spec)()
        if not all(map(torch.equal, results, expected)):
            raise SystemExit(f"{case.id}: other bits than with the layout {default!r}")


@torch.no_grad()
def run(case: Case) -> None:
    spec = arch.detect(torch.cuda.current_device())
    call: Callable[[], Sequence[torch.Tensor]]
    call = _forward(case, spec) if case.direction == "fwd" else _backward(case)
    _check(case, spec, call())
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.ncu_case", description=__doc__)
    parser.add_argument("--kernel", choices=LAYOUTS, required=True)
    parser.add_argument("--layout", required=True)
    add_shape(parser)
    args = parser.parse_args(argv)
    run(Case(args.kernel, args.layout, shape_of(args), args.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
