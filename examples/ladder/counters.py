"""Nsight Compute counters of the rungs: python -m examples.ladder.counters --out FILE

Each rung runs once under `ncu`, D = 128 without a mask; rungs 0 and 1 also at twice the length, because their bytes of
HBM grow differently. Rung 9 is the kernel of cute_flash. The file has the counters of each kernel, by the names of
`profiling.counters.ncu_metrics`, and the stall reasons of warps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import cute_flash
from cute_flash.tools.progress import steps
from examples.ladder import harness
from examples.ladder.__main__ import BACKWARD, FORWARD, rung_class
from examples.ladder.conflicts import totals
from profiling.counters.ncu_metrics import COLLECTED, METRICS, Profile, parse_raw
from profiling.measure import machine

HEAD_DIM, BATCH, HEADS, SEQLEN = 128, 2, 8, 2048
STALLS = ("long_scoreboard", "short_scoreboard", "barrier", "math_pipe_throttle", "mio_throttle", "wait", "gmma")
METRIC_NAMES = [*COLLECTED]
METRIC_NAMES += [f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS]
PADDED, PRODUCT = "3 padded", "9"
LAUNCHES = {"0": 3, "B1": 2}  # kernels of a rung; the others have one
LONG = {f"{name} S={2 * SEQLEN}": 2 * SEQLEN for name in "01"}


def launch(name: str) -> None:
    """Run a rung once."""
    q, k, v, dout = harness.random_inputs(BATCH, HEADS, LONG.get(name, SEQLEN), HEAD_DIM)
    if name == PRODUCT:
        cute_flash.attn(q, k, v)
        return
    rung = rung_class(name.partition(" ")[0])
    with padded_tiles(rung) if name == PADDED else nullcontext():
        if name in BACKWARD:
            run, _ = harness.backward_call(rung, q, k, v, dout, False)
        else:
            run, _ = harness.forward_call(rung, q, k, v, False)
    run()


@contextmanager
def padded_tiles(rung: Any) -> Iterator[None]:
    """The rung with padded tiles."""
    before, rung.variant = rung.variant, "padded"
    harness.launcher.cache_clear()
    try:
        yield
    finally:
        rung.variant = before
        harness.launcher.cache_clear()


def profile(names: list[str]) -> dict[str, dict[str, Any]]:
    """The counters of the kernels of each rung, by kernel. All rungs run in one process, one after another."""
    command = [
        "ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
        "--kernel-name", "regex:^(rung|bwd)_|^cute_flash_fwd", "--metrics", ",".join(METRIC_NAMES),
        sys.executable, "-m", "examples.ladder.counters", "--launch", "--rungs", *names,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    if done.returncode:
        raise RuntimeError(f"ncu failed:\n{done.stdout[-2000:]}")
    launched, found = iter(parse_raw(done.stdout)), {}
    for name in names:
        # A backward needs the output and the LSE of cute_flash's forward.
        skipped = [next(launched).kernel] if name in BACKWARD else []
        if not all(kernel.startswith("cute_flash") for kernel in skipped):
            raise RuntimeError(f"rung {name}: {skipped} is not the forward")
        kernels = [next(launched) for _ in range(LAUNCHES.get(name.partition(" ")[0], 1))]
        found[name] = {one.kernel: _counters(one) for one in kernels}
    return found


def _counters(one: Profile) -> dict[str, Any]:
    return {**{key: one[key] for key in METRICS if one[key] is not None}, "stalls": one.stalls}


def predictions(names: list[str]) -> dict[str, dict[str, int]]:
    """What `conflicts` predicts of the counters of the mma.sync rungs."""
    found = {}
    for name in names:
        if name not in (*FORWARD, PADDED, *BACKWARD):
            continue
        rung = rung_class(name.partition(" ")[0])(HEAD_DIM, False)
        if hasattr(rung, "variant"):
            rung.variant = "padded" if name == PADDED else rung.variant
            found[name] = totals(rung, BATCH * HEADS, SEQLEN)
    return found


def parser_of_counters() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.ladder.counters", description=__doc__)
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--rungs", nargs="*", default=[*FORWARD, PADDED, *LONG, PRODUCT, *BACKWARD])
    parser.add_argument("--launch", action="store_true", help="run the rungs, to be profiled")
    return parser


def main() -> None:
    parser = parser_of_counters()
    args = parser.parse_args()
    if args.launch:
        with steps("launching", len(args.rungs)) as done:
            for name in args.rungs:
                launch(name)
                torch.cuda.synchronize()
                done(f"rung {name}")
        return
    if shutil.which("ncu") is None or not torch.cuda.is_available():
        parser.error("needs a GPU and ncu")
    found = profile(args.rungs)
    shape = {"head_dim": HEAD_DIM, "batch": BATCH, "heads": HEADS, "seqlen": SEQLEN, "causal": False}
    record = {"machine": machine.facts(), "shape": shape, "rungs": found, "predicted": predictions(args.rungs)}
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
