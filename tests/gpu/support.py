"""Counts of the random calls of `test_attention.py` by feature: the data of the support table in docs/support.md.

    python -m pytest tests/gpu/test_attention.py -k random --support FOLDER
    python -m tests.gpu.support FOLDER profiling/results/h200/DATE-support.json
    python -m profiling plots

Each cell is the number of calls that passed, by family of kernels, direction and dtype. The record has the commit and
the digest of the source that ran.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from profiling.measure import machine
from tests.combinations import VarlenCombination
from tests.gpu.calls import Call, Kind

# Facts of a machine that the runs of one record share.
SAME = ("git_commit", "source_digest", "gpu")
FEATURES = ("softcap", "alibi", "sinks", "dropout")


def record_of(call: Call) -> dict[str, Any]:
    """A call that passed."""
    one, kind = call.one, Kind.of(call)
    rows = {
        "no mask": kind.mask == "",
        "causal or one bound": kind.mask in ("l", "r"),
        "window": kind.mask == "lr",
        "grouped heads": one.group > 1,
        "odd numbers of heads": one.heads % 2 == 1,
        "head dim above 128": kind.head_dim > 128,
        "values of another width": kind.head_dim != kind.head_dim_v,
        "plain": not kind.names,
        **{name: name in kind.names for name in FEATURES},
        "all four together": set(FEATURES) <= set(kind.names),
        "deterministic": kind.deterministic,
        "packed": call.is_varlen,
        "packed, seqused_k": isinstance(call.case, VarlenCombination) and call.case.lengths.used is not None,
        "packed, all four": call.is_varlen and set(FEATURES) <= set(kind.names),
    }
    dtype = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}[str(kind.dtype)]
    return {
        "family": call.family,
        "dtype": dtype,
        "directions": ["forward", "backward"],
        "rows": [name for name, is_so in rows.items() if is_so],
    }


def write(folder: str, family: str, ran: str, calls: list[dict[str, Any]]) -> None:
    path = Path(folder) / f"{family}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"ran": ran, "calls": calls, "machine": machine.facts()}), encoding="utf-8")


def record(folder: Path) -> dict[str, Any]:
    """The machine, the source, and row -> "family direction dtype" -> number of calls that passed."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    facts = [run["machine"] for run in runs]
    for name in SAME:
        if len({one[name] for one in facts}) != 1:
            raise ValueError(f"{folder}: runs of different {name}: {', '.join(str(one[name]) for one in facts)}")
    table: dict[str, Counter[str]] = {}
    for call in (call for run in runs for call in run["calls"]):
        for row in call["rows"]:
            for direction in call["directions"]:
                place = f"{call['family']} {direction} {call['dtype']}"
                table.setdefault(row, Counter())[place] += 1
    right = {row: dict(sorted(found.items())) for row, found in table.items()}
    return {"machine": facts[0], "ran": [run["ran"] for run in runs], "right": right}


def main() -> None:
    folder, target = sys.argv[1:]
    Path(target).write_text(json.dumps(record(Path(folder)), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
