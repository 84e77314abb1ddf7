"""The checked-in files behind the documents: the newest run of each name, and the counters of Nsight Compute.

Paths are relative to `DATA`, as in the links of the documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NamedTuple

from profiling.measure.machine import ROOT
from profiling.measure.record import Run

DATA = ROOT / "profiling"
RESULTS = "results/h200"


def newest(name: str, folder: str = RESULTS) -> str:
    """The newest run of this name: <folder>/<date>-<name>.json."""
    dated = "[0-9]" * 4 + "-[0-9][0-9]" * 2
    found = sorted((DATA / folder).glob(f"{dated}-{name}.json"))
    if not found:
        raise FileNotFoundError(f"{DATA / folder}: no run {name}")
    return found[-1].relative_to(DATA).as_posix()


# Runs of `python -m profiling all`.
FORWARD, FORWARD_SM80 = newest("fwd-sm90-paper"), newest("fwd-sm80-paper")
BACKWARD, BACKWARD_SM80 = newest("bwd-sm90-paper"), newest("bwd-sm80-paper")
# The same with (B, H, S, D) memory; the runs above have (B, S, H, D) memory.
BACKWARD_SM80_BHSD = newest("bwd-sm80-paper-bhsd")
# The sm80 kernels with the tiles of several GPUs.
TILES = newest("tiles-fwd"), newest("tiles-bwd")
GQA = newest("fwd-sm90-gqa"), newest("fwd-sm90-gqa8")
FEATURES, MODS, FP32, DECODE = newest("features"), newest("mods"), newest("fp32"), newest("decode")
MLA = newest("decode-mla")
# Head dims above 256.
WIDE = newest("wide-fwd"), newest("wide-bwd")
TRAINING, CONTEXT_PARALLEL, HOST = newest("training"), newest("context-parallel"), newest("host")
STANDARD, NUMERICS_GPU = newest("standard"), newest("numerics")
# Files that `all` does not write: the start of a process, the ladder, a run without a GPU, counters, and the record of
# the random calls.
START = newest("start")
LADDER, LADDER_COUNTERS = newest("ladder"), newest("ladder-counters")
NUMERICS_CPU = newest("numerics", "results/cpu")
COUNTERS = "reports/h200/ncu.json"
BY_INSTRUCTION = f"{RESULTS}/2026-11-18-bwd-by-instruction.txt"
SUPPORT = f"{RESULTS}/2026-11-17-support.json"


@cache
def read(path: str) -> Any:
    """A `Run` of `bench`, the record of another command, or the text of a file that is not JSON."""
    file = DATA / path
    if not file.exists():
        raise FileNotFoundError(path)
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".json":
        return text
    data = json.loads(text)
    return Run.from_dict(data) if "providers" in data else data


class Recipe(NamedTuple):
    """A figure or a table: a function of records, and the files that have them; without files, it shows a model."""

    function: Callable[..., Any]
    files: Collection[str] = ()

    def make(self) -> Any:
        return self.function(*map(read, self.files))


def commit_of(machine: dict[str, Any]) -> str:
    """The first digits of the commit of a run."""
    return (machine.get("git_commit") or "unknown")[:7]
