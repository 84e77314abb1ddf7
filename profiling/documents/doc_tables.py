"""The generated tables of README.md and docs/, from checked-in files: no number is copied by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from cute_flash.planning.plan import plan_backward
from cute_flash.smem.tile import VARIANTS
from cute_flash.spec import arch
from layouts.backward import bwd_sm80_uses
from layouts.kernels import predict
from profiling.bench.report import NOISY_SPREAD
from profiling.counters import ncu_source
from profiling.counters.expect import work_of
from profiling.counters.ncu_case import BEYOND_L2, LAYOUTS, case_of, is_beyond_l2, measured_cases
from profiling.documents import concept_tables, doc_results, kernel_changes, plot_cp
from profiling.documents.every_run import STEPS, Step
from profiling.documents.feature_tables import FEATURES, by_head_dim, features
from profiling.documents.figures import (
    BACKWARD,
    BACKWARD_SM80,
    BACKWARD_SM80_BHSD,
    BY_INSTRUCTION,
    COUNTERS,
    DATA,
    FORWARD,
    FORWARD_SM80,
    NUMERICS_CPU,
    NUMERICS_GPU,
    RESULTS,
    STANDARD,
    newest,
)
from profiling.measure.machine import ROOT
from profiling.measure.record import Cell, Run, load
from profiling.measure.shapes import MASKS, Shape
from profiling.measure.tables import Table, geometric_mean
from profiling.studies import numerics_report, standard_report

README, DOCS = ROOT / "README.md", ROOT / "docs"
_BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
# The shortest and the longest sequence of the papers, and one between.
LENGTHS = (512, 2048, 16384)
RUNS = {
    "forward sm90": FORWARD,
    "forward sm80": FORWARD_SM80,
    "backward sm90": BACKWARD,
    "backward sm80": BACKWARD_SM80,
}
SHORT = 1024
PEERS = {"sdpa-flash": "FA2", "sdpa-cudnn": "cuDNN", "sdpa-efficient": "memory-efficient", "fa3": "FA3", "fa4": "FA4"}
# The record of the random calls.
SUPPORT = f"{RESULTS}/2026-11-17-support.json"
EVERY_RUN = tuple(newest(step.name) for step in STEPS)
# Commit -> kernel and head dim of its counters.
COUNTED = {
    "7fbd6cd": (("bwd/sm80", 128),),
    "8e095e9": (("fwd/sm80", 128), ("fwd/sm90", 128), ("bwd/sm90", 128), ("bwd/sm90", 256)),
}
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
        if case["kernel"].startswith("fwd") and not is_beyond_l2(case):
            time = f"{case['measured']['duration_ns'] / 1e3:.1f}"
            name = f"{case['kernel']}, {case['shape']['head_dim']}"
            rows.append((name, _linked(case), time, _loads(case), _both(case, "st_conflicts"), _copies(case)))
    return Table("", ("kernel, D", "layout", "time, us", *counted), tuple(rows))


def bwd_layouts() -> Table:
    """The backward kernels, which are built swizzled only; other layouts of the mma.sync kernel are predictions."""
    rows = []
    for case in _cases():
        if case["kernel"].startswith("bwd") and not is_beyond_l2(case):
            is_sm80 = case["kernel"] == "bwd-sm80"
            time = f"{case['measured']['duration_ns'] / 1e3:.1f}"
            name = f"{case['kernel']}, {case['shape']['head_dim']}"
            loads = [_both(case, metric) for metric in ("ld_conflicts", "ld_wavefronts")]
            stores = [_both(case, metric) for metric in ("st_conflicts", "st_wavefronts")]
            ldmatrix = _both(case, "sass_ldsm_conflicts") if is_sm80 else "wgmma"
            copies = _both(case, "sass_ldgsts_wavefronts") if is_sm80 else "TMA"
            rows.append((name, _linked(case), time, ldmatrix, *loads, *stores, copies))
            rows += [_predicted_backward(case, name, layout) for layout in VARIANTS[1:] if is_sm80]
    counted = ("ldmatrix conflicts", "load conflicts", "load wavefronts", "store conflicts", "store wavefronts")
    return Table("", ("kernel, D", "layout", "time, us", *counted, "cp.async wavefronts"), tuple(rows))


def _predicted_backward(case: Case, name: str, layout: str) -> tuple[str, ...]:
    """The row of a layout that the mma.sync backward is not built with."""
    shape = Shape(**case["shape"])
    plan = plan_backward(shape.problem(case["dtype"]), arch.by_name("sm_90"), family="sm80")
    count = predict(bwd_sm80_uses(plan.tile, layout), work_of(plan))
    loads, stores = count["ldmatrix"] + count["ld.shared"], count["st.shared"]
    values = (count["ldmatrix"].conflicts, loads.conflicts, loads.wavefronts, stores.conflicts, stores.wavefronts)
    return name, f"{layout}, not built", "-", *(f"({_number(v)})" for v in (*values, count["cp.async"].wavefronts))


def by_instruction() -> Table:
    """Shared-memory wavefronts by instruction of the backward kernels."""
    kinds = {"ldmatrix": "LDSM", "loads": "LDS", "stmatrix": "STSM", "stores": "STS", "cp.async": "LDGSTS"}
    rows = []
    for case_id, counted in ncu_source.read_tables((DATA / BY_INSTRUCTION).read_text(encoding="utf-8")).items():
        case = case_of(case_id, symbol="")
        cells = []
        for opcode in kinds.values():
            of_kind = [count for name, count in counted.items() if name.partition(".")[0] == opcode]
            total = sum(of_kind, ncu_source.Counted())
            cells.append(f"{total.wavefronts:,} ({total.ideal:,})" if total.executed else "-")
        rows.append((f"[{case.kernel}]({BY_INSTRUCTION}), {case.shape.head_dim}", *cells))
    return Table("", ("kernel, D", *kinds), tuple(rows))


def hbm_bytes() -> Table:
    """DRAM bytes of every kernel with its default layout, in MB."""
    rows = []
    for case in _cases():
        if case["layout"] == LAYOUTS[case["kernel"]][0]:
            shape, predicted, measured = case["shape"], case["predicted"], case["measured"]
            name = (
                f"{case['kernel']}, B {shape['batch']}, H {shape['heads']}, S {shape['seqlen']}, D {shape['head_dim']}"
            )
            cells = []
            for metric, once in (("dram_read_bytes", "least_read_bytes"), ("dram_write_bytes", "output_bytes")):
                values = (predicted[once], predicted[metric], measured[metric])
                cells += ["-" if value is None else f"{value / 1e6:.1f}" for value in values]
            rows.append((name, *cells))
    columns = [
        f"{word}: {what}" for word in ("read", "written") for what in ("every tensor once", "L2 model", "measured")
    ]
    return Table("", ("MB", *columns), tuple(rows))


def beyond_l2() -> str:
    """HBM bytes over the model for a shape whose outputs exceed L2."""
    cases = [case for case in _cases() if is_beyond_l2(case)]
    shape = ", ".join(f"{name} {value}" for name, value in BEYOND_L2.items())
    if not cases:
        return (
            f"No report of a shape beyond L2 ({shape}) is checked in yet, so the writes of outputs larger than L2 are "
            "not verified: `python -m profiling ncu --beyond-l2 --out profiling/reports/h200`."
        )
    kernels = {case["kernel"]: case for case in cases}

    def over_model(metric: str) -> str:
        ratios = {name: case["measured"][metric] / case["predicted"][metric] for name, case in kernels.items()}
        return ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())

    return (
        f"Measured over the L2 model, for a shape whose outputs exceed L2 ({shape}): written bytes "
        f"{over_model('dram_write_bytes')}; read bytes {over_model('dram_read_bytes')}."
    )


def _percent(case: Case, metric: str) -> str:
    value = case["measured"].get(metric)
    return "-" if value is None else f"{value:.0f} %"


def _stalls(case: Case) -> str:
    stalls = case["stalls"] or {}
    total = sum(stalls.values())
    longest = sorted(stalls.items(), key=lambda stall: -stall[1])[:2]
    return ", ".join(f"{name} {value / total:.0%}" for name, value in longest) or "-"


def limits() -> Table:
    """Use of the hardware units and stall reasons of each kernel with its default layout."""
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
        if case["layout"] != LAYOUTS[case["kernel"]][0] or is_beyond_l2(case):
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
    """Our speed over that of the fastest peer with correct results, in each cell of a run."""
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
        commit = f"`{run.machine['git_commit'][:7]}`"
        short = _mean(_over_best(run, (cell for cell in run.cells if cell.shape.seqlen <= SHORT)))
        peers = ", ".join(PEERS[peer] for peer in run.peers)
        rows.append((name, peers, mean, reach, *dims, short, commit))
    columns = ("kernel", "best of", "mean of 36 cells", "lowest to highest", "D = 64", "128", "256")
    return Table("", (*columns, f"S ≤ {SHORT}", "commit"), tuple(rows))


def conditions() -> str:
    """Versions of the libraries, and cells with a power cap or a large spread of rounds."""
    runs = {label: load(DATA / path) for label, path in RUNS.items()}
    machine = next(run.machine for run in runs.values() if "fa3" in run.peers)
    cudnn, fa3 = machine["cudnn"], machine["flash_attn_3"]
    capped = {
        label: sum("sw_power_cap" in cell.after["clock_reasons"] for cell in run.cells) for label, run in runs.items()
    }
    noisy = {
        label: sum((cell.results[run.ours[0]].spread or 0.0) > NOISY_SPREAD for cell in run.cells)
        for label, run in runs.items()
    }
    return "\n".join(
        (
            f"- Versions: torch {machine['torch']} with its FlashAttention-2, cuDNN {cudnn // 10000}."
            f"{cudnn // 100 % 100}.{cudnn % 100}, FlashAttention-3 ({fa3['origin']}, SHA-256 {fa3['digest']}), "
            f"FlashAttention-4 {machine['flash_attn_4']}, driver {machine['driver']}.",
            f"- Cells, of 36, in which the card reported its power cap: {_counts(capped)}.",
            f"- Cells in which rounds of cute_flash differ by over {100 * NOISY_SPREAD:.0f} %: {_counts(noisy)}.",
        )
    )


def steps_by_commit() -> dict[str, list[Step]]:
    """The runs of the documents, by their commits; the commit whose runs measure most kernels is the first."""
    found: dict[str, list[Step]] = {}
    for step, path in zip(STEPS, EVERY_RUN, strict=True):
        facts = json.loads((DATA / path).read_text(encoding="utf-8"))["machine"]
        found.setdefault(facts["git_commit"], []).append(step)

    def num_kernels(commit: str) -> int:
        measured = json.loads((DATA / kernels_at(commit)).read_text(encoding="utf-8"))
        return kernel_changes.changed(measured, tuple(x for step in found[commit] for x in step.kernels))[0]

    return dict(sorted(found.items(), key=lambda item: -num_kernels(item[0])))


def kernels_at(commit: str) -> str:
    """The file with the digests of the kernels at a commit, as a path from DATA."""
    return f"{RESULTS}/{kernel_changes.file_name(commit)}"


def _kernel_sentence(commit: str, patterns: Iterable[str]) -> str:
    text = (DATA / kernels_at(commit)).read_text(encoding="utf-8")
    return kernel_changes.sentence(json.loads(text), tuple(dict.fromkeys(patterns)))


def kernels() -> str:
    """The commits of the measurements, and the kernels that changed since."""
    lines = []
    for commit, steps in steps_by_commit().items():
        names = ", ".join(step.name for step in steps)
        text = _kernel_sentence(commit, (pattern for step in steps for pattern in step.kernels))
        lines.append(f"- {names}: {text}.")
    what = "Counters of Nsight Compute, and wavefronts by instruction (main kernels, default layouts)"
    for commit, counted in COUNTED.items():
        names = ", ".join(f"{kernel.replace('/', '-')} D = {head_dim}" for kernel, head_dim in counted)
        patterns = [f"{kernel}/sm_90/d{head_dim}/bf16/full/plain/main" for kernel, head_dim in counted]
        lines.append(f"- {what} of {names}: {_kernel_sentence(commit, patterns)}.")
    return "\n".join(lines)


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{label} {count}" for label, count in found.items())


def memory() -> str:
    """The sm80 backward over FlashAttention-2 in both memory layouts, and the time that (B, H, S, D) adds to each.

    Both numbers are of the cells of the run in (B, H, S, D) memory.
    """
    bshd, bhsd = load(DATA / BACKWARD_SM80), load(DATA / BACKWARD_SM80_BHSD)
    ours, peer = bshd.ours[0], bshd.reference
    measured = {cell.key for cell in bhsd.cells}
    bshd = replace(bshd, cells=tuple(cell for cell in bshd.cells if cell.key in measured))
    before = {cell.key: cell.results for cell in bshd.cells}

    def added(name: str) -> list[float]:
        pairs = [(before[cell.key][name].ms, cell.results[name].ms) for cell in bhsd.cells]
        return [after - first for first, after in pairs if first is not None and after is not None]

    def span(values: list[float]) -> str:
        low, high, middle = (round(1e3 * value) for value in (min(values), max(values), median(values)))
        return f"{low} to {high} µs (median {middle})"

    text = (
        f"In {len(bhsd.cells)} cells the sm80 backward is {_mean(_over_best(bshd, bshd.cells))} × as fast as "
        "FlashAttention-2 on (B, S, H, D) "
        f"memory and {_mean(_over_best(bhsd, bhsd.cells))} × on (B, H, S, D) memory ([run]({BACKWARD_SM80_BHSD})). "
        f"(B, H, S, D) memory adds {span(added(peer))} to a call of FlashAttention-2 through SDPA, and "
        f"{span(added(ours))} to a call of cute_flash."
    )
    return re.sub(r" -(?=\d)", " −", text)


def cells(forward: str, backward: str) -> Table:
    """TFLOP/s, and the speed over the best peer, in every cell of a run of each direction."""
    rows = []
    lengths: list[int] = []
    for label, path in (("forward", forward), ("backward", backward)):
        run = load(DATA / path)
        lengths = sorted({cell.shape.seqlen for cell in run.cells})
        at = {(cell.shape.head_dim, cell.shape.mask, cell.shape.seqlen): cell for cell in run.cells}
        for head_dim, mask in product(sorted({cell.shape.head_dim for cell in run.cells}), MASKS):
            row = [at[head_dim, mask, length] for length in lengths]
            texts = [f"{_number(cell.tflops(run.ours[0]))} ({_mean(_over_best(run, [cell]))})" for cell in row]
            rows.append((f"{label}, D = {head_dim}, {mask}", *texts))
    return Table("", ("TFLOP/s (speed-up)", *(f"S = {length}" for length in lengths)), tuple(rows))


def example() -> str:
    """The time of a shape that was not measured, from the TFLOP/s of its cell."""
    shape = Shape(batch=2, heads=32, heads_kv=32, seqlen=8192, head_dim=128, causal=True)
    like = (shape.seqlen, shape.head_dim, shape.causal)
    times = []
    for label, direction, path in (("forward", "fwd", FORWARD), ("backward", "bwd", BACKWARD)):
        run = load(DATA / path)
        speed = next(
            cell.tflops(run.ours[0])
            for cell in run.cells
            if (cell.shape.seqlen, cell.shape.head_dim, cell.shape.causal) == like
        )
        tflop = shape.flops(direction) / 1e12
        if speed:
            times.append(f"{label} {tflop:.2f} TFLOP at {speed:.0f} TFLOP/s, {1e3 * tflop / speed:.1f} ms")
    sizes = f"B = {shape.batch}, H = {shape.heads}, S = {shape.seqlen}, D = {shape.head_dim}, {shape.mask}"
    return f"Example: {sizes}: {'; '.join(times)}."


# Rows of the support record -> their labels in the table, in the order of the table.
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
    "packed, all four": "varlen, softcap, ALiBi, sinks and dropout together",
}
PLACES = [(f, d) for f in ("sm90", "sm80") for d in ("forward", "backward")]


def support() -> Table:
    """The number of random calls that matched the reference, bf16 + fp16; "-": unsupported, or none was made."""
    right = json.loads((DATA / SUPPORT).read_text(encoding="utf-8"))["right"]

    def cell(row: str, family: str, direction: str) -> str:
        found = right.get(row, {})
        counts = [found.get(f"{family} {direction} {dtype}", 0) for dtype in ("bf16", "fp16")]
        return " + ".join(map(str, counts)) if any(counts) else "-"

    rows = [(label, *(cell(row, *place) for place in PLACES)) for row, label in ROWS.items()]
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
    "conditions": (conditions, tuple(RUNS.values())),
    "kernels": (kernels, (*EVERY_RUN, *map(kernels_at, {*steps_by_commit(), *COUNTED}))),
    "memory": (memory, (BACKWARD_SM80, BACKWARD_SM80_BHSD)),
    "cells_sm90": (lambda: _markdown(cells(FORWARD, BACKWARD)), (FORWARD, BACKWARD)),
    "cells_sm80": (lambda: _markdown(cells(FORWARD_SM80, BACKWARD_SM80)), (FORWARD_SM80, BACKWARD_SM80)),
    "example": (example, (FORWARD, BACKWARD)),
    "features": (lambda: _markdown(features(DATA)), (FEATURES,)),
    "features_by_head_dim": (lambda: _markdown(by_head_dim(DATA)), (FEATURES,)),
    "support": (lambda: _markdown(support()), (SUPPORT,)),
    "bwd_layouts": (lambda: _markdown(bwd_layouts()), (COUNTERS,)),
    "by_instruction": (lambda: _markdown(by_instruction()), (BY_INSTRUCTION,)),
    "hbm_bytes": (lambda: _markdown(hbm_bytes()), (COUNTERS,)),
    "beyond_l2": (beyond_l2, (COUNTERS,)),
    "standard": (_study(standard_report.claims, STANDARD), (STANDARD,)),
    "standard_figure": (lambda: "![Standard attention over cute_flash, by length](plots/standard.svg)", (STANDARD,)),
    "numerics_ways": (_study(numerics_report.ways, NUMERICS_CPU, "records"), (NUMERICS_CPU,)),
    "numerics_dtypes": (_study(numerics_report.dtypes, NUMERICS_CPU, "records"), (NUMERICS_CPU,)),
    "numerics_gpu": (_study(numerics_report.gpu_out, NUMERICS_GPU, "records"), (NUMERICS_GPU,)),
    "numerics_gpu_figure": (
        lambda: "![Errors of GPU kernels by dtype and distribution](plots/numerics-gpu.svg)",
        (NUMERICS_GPU,),
    ),
    "accuracy": (lambda: _markdown(doc_results.accuracy(DATA)), tuple(RUNS.values())),
    "accuracy_line": (lambda: doc_results.accuracy_line(DATA), tuple(RUNS.values())),
    "fp32": (lambda: _markdown(doc_results.fp32_speed(DATA)), (doc_results.FP32,)),
    "fp32_line": (lambda: doc_results.fp32_line(DATA), (doc_results.FP32,)),
    "fp32_error_line": (lambda: doc_results.fp32_error_line(DATA), (doc_results.FP32,)),
    "fp32_accuracy": (lambda: _markdown(doc_results.fp32_accuracy(DATA)), (doc_results.FP32,)),
    "decode": (lambda: _markdown(doc_results.decode_cells(DATA)), (doc_results.DECODE,)),
    "decode_line": (lambda: doc_results.decode_line(DATA), (doc_results.DECODE,)),
    "decode_variants": (lambda: _markdown(doc_results.decode_variants(DATA)), (doc_results.DECODE,)),
    "decode_layers": (lambda: doc_results.decode_layers(DATA), (doc_results.DECODE,)),
    "training": (lambda: _markdown(doc_results.training_steps(DATA)), (doc_results.TRAINING,)),
    "training_line": (lambda: doc_results.training_line(DATA), (doc_results.TRAINING,)),
    "context_parallel_times": (
        lambda: _markdown(doc_results.context_parallel_times(DATA)),
        (doc_results.CONTEXT_PARALLEL,),
    ),
    "gqa": (lambda: _markdown(doc_results.gqa(DATA)), doc_results.GQA),
    "mods": (lambda: _markdown(doc_results.mods(DATA)), (doc_results.MODS,)),
    "host": (lambda: _markdown(doc_results.host(DATA)), (doc_results.HOST,)),
    "start": (lambda: doc_results.start(DATA), (doc_results.HOST,)),
    # Tables of models, which read no file.
    "chips": (lambda: _markdown(concept_tables.chips()), ()),
    "shapes": (lambda: _markdown(concept_tables.shapes()), ()),
    "loop_orders": (concept_tables.loop_orders, ()),
    "tile_rules": (concept_tables.tile_rules, ()),
    "context_parallel": (lambda: _markdown(plot_cp.table()), ()),
    "context_parallel_ratio": (plot_cp.ratios, ()),
    "context_parallel_figure": (lambda: "![Predicted efficiency by GPUs](plots/context-parallel.svg)", ()),
    "hbm": (lambda: "![HBM bytes, predicted and measured](plots/hbm.svg)", (COUNTERS,)),
}


def missing(name: str) -> list[str]:
    return [source for source in BLOCKS[name][1] if not (DATA / source).exists()]


def embed(text: str, folder: str = "") -> str:
    """The document with its generated blocks rewritten; `folder` is the prefix of links to files of profiling/."""

    def block(match: re.Match[str]) -> str:
        name = match[2]
        lacking = missing(name)
        body = f"*Not measured yet: {', '.join(lacking)} does not exist.*" if lacking else BLOCKS[name][0]()
        body = re.sub(r"\]\((?=results/|reports/|plots/)", f"]({folder}", body)
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _BLOCK.sub(block, text)


# Document -> prefix of its links to files of profiling/.
DOCUMENTS = {
    README: "profiling/",
    **{
        DOCS / f"{name}.md": "../profiling/"
        for name in ("distributed", "how-it-works", "numerics", "numerics-study", "performance", "support")
    },
}


def write() -> None:
    for path, folder in DOCUMENTS.items():
        path.write_text(embed(path.read_text(encoding="utf-8"), folder), encoding="utf-8")
