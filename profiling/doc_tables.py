"""The generated tables of README.md and docs/, from checked-in files: no number is copied by hand."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cute_flash.spec import arch
from profiling import concept_tables, doc_results, numerics_report, standard_report
from profiling.feature_tables import FEATURES, features
from profiling.figures import (
    BACKWARD,
    BACKWARD_SM80,
    COUNTERS,
    DATA,
    FORWARD,
    FORWARD_SM80,
    NUMERICS_CPU,
    NUMERICS_GPU,
    STANDARD,
)
from profiling.machine import ROOT
from profiling.ncu_case import LAYOUTS, measured_cases
from profiling.record import Cell, Run, load
from profiling.report import geometric_mean
from profiling.suites import MASKS
from profiling.terminal import Table

README, DOCS = ROOT / "README.md", ROOT / "docs"
_BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
# The papers' shortest and longest sequences, and one between.
LENGTHS = (512, 2048, 16384)
RUNS = {
    "forward sm90": FORWARD,
    "forward sm80": FORWARD_SM80,
    "backward sm90": BACKWARD,
    "backward sm80": BACKWARD_SM80,
}
SHORT = 1024
PEERS = {"sdpa-flash": "FA2", "sdpa-cudnn": "cuDNN", "sdpa-efficient": "memory-efficient", "fa3": "FA3", "fa4": "FA4"}
SUPPORT = "results/h200/2026-11-16-support.json"
Case = dict[str, Any]


def _cases() -> list[Case]:
    return measured_cases(json.loads((DATA / COUNTERS).read_text(encoding="utf-8")))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _both(case: Case, metric: str) -> str:
    """measured (predicted); only measured if there is no prediction."""
    measured, predicted = case["measured"][metric], case["predicted"].get(metric)
    if predicted is None:
        return _number(measured)
    return f"{_number(measured)} ({_number(predicted)})"


def _copies(case: Case) -> str:
    return _both(case, "sass_ldgsts_wavefronts") if case["kernel"] == "fwd-sm80" else "TMA"


def _loads(case: Case) -> str:
    return _both(case, "sass_ldsm_conflicts") if case["kernel"] == "fwd-sm80" else "wgmma"


def _linked(case: Case) -> str:
    folder = Path(COUNTERS).parent
    return f"[{case['layout']}]({folder}/{Path(case['report']).with_suffix('.txt')})"


def layouts() -> Table:
    counted = ("ldmatrix conflicts", "store conflicts", "cp.async wavefronts")
    rows = []
    for case in _cases():
        if case["kernel"].startswith("fwd"):
            time = f"{case['measured']['duration_ns'] / 1e3:.1f}"
            name = f"{case['kernel']}, {case['shape']['head_dim']}"
            rows.append((name, _linked(case), time, _loads(case), _both(case, "st_conflicts"), _copies(case)))
    return Table("", ("kernel, D", "layout", "time, us", *counted), tuple(rows))


def _percent(case: Case, metric: str) -> str:
    value = case["measured"].get(metric)
    return "-" if value is None else f"{value:.0f} %"


def _stalls(case: Case) -> str:
    stalls = case["stalls"] or {}
    total = sum(stalls.values())
    longest = sorted(stalls.items(), key=lambda stall: -stall[1])[:2]
    return ", ".join(f"{name} {value / total:.0%}" for name, value in longest) or "-"


def limits() -> Table:
    """Each kernel with its default layout."""
    names = {
        "tensor cores": "tensor_percent",
        "XU (exp2)": "xu_percent",
        "FMA": "fma_percent",
        "ALU": "alu_percent",
        "shared memory": "lsu_data_percent",
        "issue slots": "issue_percent",
    }
    rows = []
    for case in _cases():
        if case["layout"] != LAYOUTS[case["kernel"]][0]:
            continue
        peak = arch.H200.tensor_tflops
        speed = f"{case['tflops']:.0f} ({case['tflops'] / peak:.0%})"
        units = [_percent(case, metric) for metric in names.values()]
        warps = f"{16 * case['measured']['occupancy_percent'] / 100:.1f}"
        kernel = f"{case['kernel']}, {case['shape']['head_dim']}"
        rows.append((kernel, speed, *units, warps, _stalls(case)))
    columns = ("kernel, D", "TFLOP/s (of 989)", *names, "warps a scheduler", "stall reasons")
    return Table("", columns, tuple(rows))


def _speeds(run: Run, head_dim: int, mask: str) -> list[str]:
    cells = {
        cell.shape.seqlen: cell.tflops(run.ours[0])
        for cell in run.cells
        if (cell.shape.head_dim, cell.shape.mask) == (head_dim, mask)
    }
    ceiling = run.ceiling.tflops if run.ceiling and run.ceiling.tflops else 0.0
    speeds = [cells.get(length) for length in LENGTHS]
    return ["-" if not speed or not ceiling else f"{speed:.0f} ({speed / ceiling:.0%})" for speed in speeds]


def distance() -> Table:
    """TFLOP/s, and their ratio to cuBLAS in the same run."""
    rows = []
    for label, path in RUNS.items():
        run = load(DATA / path)
        for head_dim in sorted({cell.shape.head_dim for cell in run.cells}):
            speeds = [_speeds(run, head_dim, mask) for mask in ("full", "causal")]
            rows.append((f"[{label}]({path}), {head_dim}", *speeds[0], *speeds[1]))
    columns = [f"{mask} {length}" for mask in ("full", "causal") for length in LENGTHS]
    return Table("", ("kernel, D", *columns), tuple(rows))


def _over_best(run: Run, cells: Iterable[Cell]) -> list[float]:
    """Our speed over that of the fastest peer with right results, in each cell of a run."""
    pairs = ((cell, run.best_peer(cell)) for cell in cells)
    ratios = (cell.ratio(run.ours[0], best) for cell, best in pairs if best is not None)
    return [ratio for ratio in ratios if ratio is not None]


def _mean(ratios: list[float]) -> str:
    mean = geometric_mean(ratios)
    return "-" if mean is None else f"{mean:.2f}"


def summary() -> Table:
    """One line per run: geometric means of the ratio to the best peer of each cell."""
    rows = []
    for label, path in RUNS.items():
        run = load(DATA / path)
        everything = _over_best(run, run.cells)
        dims = [
            _mean(_over_best(run, (cell for cell in run.cells if cell.shape.head_dim == head_dim)))
            for head_dim in (64, 128, 256)
        ]
        reach = f"{min(everything):.2f} to {max(everything):.2f}" if everything else "-"
        mean = f"**{_mean(everything)}**"
        name = f"[{label}]({path})"
        commit = f"`{run.machine['git_commit']}`"
        short = _mean(_over_best(run, (cell for cell in run.cells if cell.shape.seqlen <= SHORT)))
        peers = ", ".join(PEERS[peer] for peer in run.peers)
        rows.append((name, peers, mean, reach, *dims, short, commit))
    columns = ("kernel", "best of", "mean of 36 cells", "lowest to highest", "D = 64", "128", "256")
    return Table("", (*columns, f"S ≤ {SHORT}", "commit"), tuple(rows))


def ratios() -> Table:
    """Forward and backward on Hopper, cell by cell."""
    rows = []
    lengths: list[int] = []
    for label, path in (("forward", FORWARD), ("backward", BACKWARD)):
        run = load(DATA / path)
        lengths = sorted({cell.shape.seqlen for cell in run.cells})
        at: dict[tuple[int, int, str], list[Cell]] = defaultdict(list)
        for cell in run.cells:
            at[cell.shape.head_dim, cell.shape.seqlen, cell.shape.mask].append(cell)
        for head_dim in sorted({cell.shape.head_dim for cell in run.cells}):
            places = [[(head_dim, length, mask) for mask in MASKS] for length in lengths]
            cells = [" / ".join(_mean(_over_best(run, at[place])) for place in pair) for pair in places]
            rows.append((f"{label}, D = {head_dim}", *cells))
    return Table("", ("full / causal", *(f"S = {length}" for length in lengths)), tuple(rows))


# Rows of the record of support -> their labels in the table, in its order.
ROWS = {
    "plain": "plain attention",
    "no mask": "no mask",
    "causal or one bound": "causal, or a bound on one side",
    "window": "window",
    "grouped heads": "grouped heads",
    "odd numbers of heads": "odd numbers of heads",
    "head dim above 128": "head dim 192, 256",
    "values of another width": "Dv ≠ D (192/128, 128/64)",
    "softcap": "softcap",
    "alibi": "ALiBi, with its gradient",
    "sinks": "sinks, with their gradient",
    "dropout": "dropout",
    "all four together": "softcap, ALiBi, sinks and dropout together",
    "deterministic": "`deterministic`, same bits",
    "packed": "varlen (`attn_varlen`)",
    "packed, seqused_k": "varlen, `seqused_k`",
    "packed, all four": "varlen, all four together",
}
PLACES = [(f, d) for f in ("sm90", "sm80") for d in ("forward", "backward")]


def support() -> Table:
    """The number of random calls that matched the reference, bf16 + fp16; "-": unsupported, or none was made."""
    right = json.loads((DATA / SUPPORT).read_text(encoding="utf-8"))["right"]

    def cell(row: str, family: str, direction: str) -> str:
        counts = [right[row].get(f"{family} {direction} {dtype}", 0) for dtype in ("bf16", "fp16")]
        return " + ".join(map(str, counts)) if any(counts) else "-"

    rows = [(label, *(cell(row, *place) for place in PLACES)) for row, label in ROWS.items() if row in right]
    return Table("", ("calls that match fp64, bf16 + fp16", *(f"{f} {d}" for f, d in PLACES)), tuple(rows))


def _study(table: Callable[[Any], Table], source: str, field: str | None = None) -> Callable[[], str]:
    """The text of a study's table, made of its whole record or of one field."""

    def make() -> str:
        record = json.loads((DATA / source).read_text(encoding="utf-8"))
        return _markdown(table(record if field is None else record[field]))

    return make


def _markdown(table: Table) -> str:
    """Columns of numbers are aligned to the right."""
    columns = list(zip(*table.rows))
    rule = ["---:" if all(re.match(r"[\d*-]", cell) for cell in column) else "---" for column in columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in (table.columns, rule, *table.rows))


# Block -> the function that makes its text, and the files that it reads.
BLOCKS: dict[str, tuple[Callable[[], str], tuple[str, ...]]] = {
    "layouts": (lambda: _markdown(layouts()), (COUNTERS,)),
    "limits": (lambda: _markdown(limits()), (COUNTERS,)),
    "distance": (lambda: _markdown(distance()), tuple(RUNS.values())),
    "conflicts": (lambda: "![Wavefronts, conflicts and time by layout](plots/conflicts.svg)", (COUNTERS,)),
    "summary": (lambda: _markdown(summary()), tuple(RUNS.values())),
    "ratios": (lambda: _markdown(ratios()), (FORWARD, BACKWARD)),
    "features": (lambda: _markdown(features(DATA)), (FEATURES,)),
    "support": (lambda: _markdown(support()), (SUPPORT,)),
    "standard": (_study(standard_report.claims, STANDARD), (STANDARD,)),
    "standard_figure": (lambda: "![Standard attention over cute_flash, by length](plots/standard.svg)", (STANDARD,)),
    "numerics_ways": (_study(numerics_report.ways, NUMERICS_CPU, "records"), (NUMERICS_CPU,)),
    "numerics_dtypes": (_study(numerics_report.dtypes, NUMERICS_CPU, "records"), (NUMERICS_CPU,)),
    "numerics_gpu": (_study(numerics_report.gpu_out, NUMERICS_GPU, "records"), (NUMERICS_GPU,)),
    "numerics_gpu_figure": (
        lambda: "![Errors of GPU kernels by dtype and distribution](plots/numerics-gpu.svg)",
        (NUMERICS_GPU,),
    ),
    "accuracy": (lambda: _markdown(doc_results.accuracy(DATA)), (*RUNS.values(), doc_results.OUTLIERS)),
    "accuracy_line": (lambda: doc_results.accuracy_line(DATA), (*RUNS.values(), doc_results.OUTLIERS)),
    "gqa": (lambda: _markdown(doc_results.gqa(DATA)), doc_results.GQA),
    "mods": (lambda: _markdown(doc_results.mods(DATA)), (doc_results.MODS,)),
    "host": (lambda: _markdown(doc_results.host(DATA)), (doc_results.HOST,)),
    "start": (lambda: doc_results.start(DATA), (doc_results.START,)),
    # Tables of models, which read no file.
    "chips": (lambda: _markdown(concept_tables.chips()), ()),
    "shapes": (lambda: _markdown(concept_tables.shapes()), ()),
    "loop_orders": (concept_tables.loop_orders, ()),
    "tile_rules": (concept_tables.tile_rules, ()),
    "hbm": (lambda: "![HBM bytes, predicted and measured](plots/hbm.svg)", (COUNTERS,)),
}


def missing(name: str) -> list[str]:
    return [source for source in BLOCKS[name][1] if not (DATA / source).exists()]


def embed(text: str, folder: str = "") -> str:
    """The document with its generated blocks made anew; links begin with `folder`."""

    def block(match: re.Match[str]) -> str:
        name = match[2]
        lacking = missing(name)
        body = f"*Waits for {', '.join(lacking)}.*" if lacking else BLOCKS[name][0]()
        body = re.sub(r"\]\((?=results/|reports/|plots/)", f"]({folder}", body)
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _BLOCK.sub(block, text)


# Document -> prefix of its links to files of this folder.
DOCUMENTS = {
    README: "profiling/",
    DOCS / "performance.md": "../profiling/",
    DOCS / "support.md": "../profiling/",
    DOCS / "numerics-study.md": "../profiling/",
    DOCS / "how-it-works.md": "../profiling/",
}


def write() -> None:
    for path, folder in DOCUMENTS.items():
        path.write_text(embed(path.read_text(encoding="utf-8"), folder), encoding="utf-8")
