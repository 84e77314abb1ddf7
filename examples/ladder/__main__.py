"""All rungs: `python -m examples.ladder`.

With a GPU: the check and the speed of each rung, beside the product's kernel. Without one: the rungs are compiled, and
the table has their registers, shared memory and instructions.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import cute_flash
from cute_flash.tools.progress import steps
from examples.ladder import harness
from profiling.measure import machine
from profiling.measure.record import write_json

FORWARD = {str(i): f"rung_{i}" for i in range(9)}
BACKWARD = {f"B{i}": f"bwd_{i}" for i in (1, 2, 3)}
CASES = [(head_dim, is_causal) for head_dim in harness.HEAD_DIMS for is_causal in (False, True)]
WIDTH = 170  # of the tables in a file
SHOWN = ("FFMA", "HMMA", "HGMMA", "LDSM", "LDGSTS", "UTMALDG", "MUFU", "BAR")  # instructions


def rung_class(name: str) -> Any:
    module = importlib.import_module(f"examples.ladder.{(FORWARD | BACKWARD)[name]}")
    return getattr(module, "Forward" if name in FORWARD else "Backward")


def idea(name: str) -> str:
    """The first sentence of a rung: "Rung 3: a swizzle."."""
    doc = importlib.import_module(f"examples.ladder.{(FORWARD | BACKWARD)[name]}").__doc__ or ""
    return doc.partition(":")[2].partition(".")[0].strip()


def product_tflops(direction: str, head_dim: int, is_causal: bool, family: str = "") -> float:
    """TFLOP/s of cute_flash on the problem of the rungs: rung 9."""
    q, k, v, dout = harness.random_inputs(harness.BATCH, harness.HEADS, harness.SEQLEN, head_dim)
    with cute_flash.use_kernels(family):
        if direction == "Forward":
            run: Callable[[], object] = lambda: cute_flash.attn(q, k, v, causal=is_causal)  # noqa: E731
        else:
            inputs = [x.requires_grad_() for x in (q, k, v)]
            out = cute_flash.attn(*inputs, causal=is_causal)
            run = lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)  # noqa: E731
        return harness.flops(head_dim, is_causal, direction) / harness.milliseconds(run) / 1e9


def case_name(head_dim: int, is_causal: bool) -> str:
    return f"{head_dim} {'causal' if is_causal else 'full'}"


def measure(names: list[str]) -> dict[str, Any]:
    """The largest error of each rung, and its TFLOP/s and the product's for each of `CASES`."""
    record: dict[str, Any] = {"machine": machine.facts(), "cases": [case_name(*case) for case in CASES], "rungs": {}}
    record["seqlen"], record["batch"], record["heads"] = harness.SEQLEN, harness.BATCH, harness.HEADS
    directions = {"Forward": "9", "Backward": "B4"}
    for direction in sorted({rung_class(name).__name__ for name in names}, reverse=True):
        for family in ("", "sm80"):
            speeds = [product_tflops(direction, *case, family) for case in CASES]
            name = f"{directions[direction]} {family}".strip()
            label = "cute_flash" + ", mma.sync" * bool(family)
            record["rungs"][name] = {"tflops": speeds, "error": None, "idea": label}
    with steps("measuring", len(names)) as done:
        for name in names:
            rung = rung_class(name)
            if any(harness.obstacle(rung(*case)) for case in CASES):
                continue
            error = max(harness.check(rung, *case, seqlen) for case in CASES for seqlen in harness.ODD_SEQLENS)
            speeds = [harness.tflops(rung, *case) for case in CASES]
            record["rungs"][name] = {"tflops": speeds, "error": error, "idea": idea(name)}
            done(f"rung {name}")
    return record


def speed_table(record: dict[str, Any]) -> Table:
    table = Table("rung", "idea", "error", *record["cases"], title="TFLOP/s (share of the product)")
    for name, found in sorted(record["rungs"].items()):
        product = record["rungs"]["B4" if name.startswith("B") else "9"]["tflops"]
        shares = [f"{x:.0f} ({x / best:.0%})" for x, best in zip(found["tflops"], product, strict=True)]
        error = "" if found["error"] is None else f"{found['error']:.2f}"
        table.add_row(name.partition(" ")[0], found["idea"], error, *shares)
    return table


def inspect(names: list[str], head_dim: int = 128) -> Table:
    """The resources of rungs, which are compiled."""
    table = Table("rung", "idea", "arch", "registers", "spilled", "smem KB", *SHOWN, title=f"D={head_dim}, full")
    with steps("compiling", len(names)) as done:
        for name in names:
            rung = rung_class(name)(head_dim, False)
            found, _ = harness.compile_rung(rung, rung.ARCH)
            counts = [str(found.sass[x] or "") for x in SHOWN]
            size = f"{found.smem_bytes / 1024:.0f}"
            table.add_row(name, idea(name), rung.ARCH, str(found.registers), str(found.spill_bytes), size, *counts)
            done(f"rung {name}")
    return table


def parser_of_ladder() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.ladder", description="All rungs of the ladder.")
    known = [*FORWARD, *BACKWARD]
    parser.add_argument("rungs", nargs="*", default=known, metavar="RUNG", help=f"{', '.join(known)} (default: all)")
    parser.add_argument("--precompile", metavar="TARGET", help="compile into the kernel cache, such as for sm_90a")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the speeds to a file")
    return parser


def main() -> int:
    parser, known = parser_of_ladder(), [*FORWARD, *BACKWARD]
    args = parser.parse_args()
    if unknown := set(args.rungs) - set(known):
        parser.error(f"no rung {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if args.precompile:
        for rung in map(rung_class, args.rungs):
            for case in CASES:
                harness.precompile(rung(*case), args.precompile)
        return 0
    is_right = True
    # A file has no width; wide enough for the tables.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    if torch.cuda.is_available():
        # Graphs are captured on a stream that is not the default one, and autograd uses the stream of the forward.
        with torch.cuda.stream(torch.cuda.Stream()):
            record = measure(args.rungs)
        if args.json:
            write_json(record, args.json)
        console.print(speed_table(record))
        console.print(f"error: the largest, over that of torch's SDPA; at most {harness.MAX_ERROR_RATIO} is right")
        is_right = all((found["error"] or 0.0) <= harness.MAX_ERROR_RATIO for found in record["rungs"].values())
    else:
        console.print(inspect(args.rungs))
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
