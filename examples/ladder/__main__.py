"""All rungs: `python -m examples.ladder`.

With a GPU: the check and the speed of each rung, beside the product's kernel. Without one: the rungs are compiled, and
the table has their registers, shared memory and instructions.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import cute_flash
from cute_flash.tools.progress import steps
from examples.ladder import harness

FORWARD = {str(i): f"rung_{i}" for i in range(9)}
BACKWARD = {f"B{i}": f"bwd_{i}" for i in (1, 2, 3)}
CASES = [(head_dim, is_causal) for head_dim in harness.HEAD_DIMS for is_causal in (False, True)]
WIDTH = 170  # of the tables in a file
SHOWN = ("FFMA", "HMMA", "HGMMA", "LDSM", "LDGSTS", "UTMALDG", "MUFU", "BAR")  # instructions


def rung_class(name: str) -> type:
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


def measure(names: list[str]) -> tuple[Table, bool]:
    """The speeds of rungs, and whether all are right."""
    is_right = True
    table = Table(
        "rung", "idea", "error", *(case_name(*case) for case in CASES), title="TFLOP/s (share of the product)"
    )
    product = {
        direction: [product_tflops(direction, *case) for case in CASES]
        for direction in sorted({rung_class(name).__name__ for name in names}, reverse=True)
    }
    with steps("measuring", len(names)) as done:
        for name in names:
            rung = rung_class(name)
            if torch.cuda.get_device_capability() < ((9, 0) if rung.ARCH == "sm_90a" else (8, 0)):
                table.add_row(name, idea(name), f"needs {rung.ARCH}")
                continue
            error = max(harness.check(rung, *case, seqlen) for case in CASES for seqlen in harness.ODD_SEQLENS)
            is_right &= error <= harness.MAX_ERROR_RATIO
            speeds = [harness.tflops(rung, *case) for case in CASES]
            shares = [
                f"{speed:.0f} ({speed / best:.0%})" for speed, best in zip(speeds, product[rung.__name__], strict=True)
            ]
            table.add_row(name, idea(name), f"{error:.2f}", *shares)
            done(f"rung {name}")
    for direction, best in product.items():
        table.add_row(
            "9" if direction == "Forward" else "B9", f"cute_flash, {direction.lower()}", "", *(f"{x:.0f}" for x in best)
        )
    return table, is_right


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.ladder", description="All rungs of the ladder.")
    known = [*FORWARD, *BACKWARD]
    parser.add_argument("rungs", nargs="*", default=known, metavar="RUNG", help=f"{', '.join(known)} (default: all)")
    parser.add_argument("--precompile", metavar="TARGET", help="compile into the kernel cache, such as for sm_90a")
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
        table, is_right = measure(args.rungs)
        console.print(table)
        console.print(f"error: the largest, over that of torch's SDPA; at most {harness.MAX_ERROR_RATIO} is right")
    else:
        console.print(inspect(args.rungs))
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
