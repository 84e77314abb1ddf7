"""The generated blocks of README.md and docs/, from checked-in files: no number is copied by hand."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from profiling.documents import (
    concept_tables,
    doc_counters,
    doc_ladder,
    doc_results,
    doc_speed,
    kernel_changes,
    plot_cp,
    sources,
)
from profiling.documents.doc_speed import RUNS
from profiling.documents.every_run import STEPS, Step
from profiling.documents.sources import Recipe, newest, read
from profiling.measure.machine import ROOT
from profiling.measure.record import Run
from profiling.measure.tables import Table
from profiling.studies import context_parallel, decode, numerics_report, standard_report, training

# Document -> prefix of its links to files of profiling/.
DOCUMENTS = {
    ROOT / name: f"{posixpath.relpath('profiling', posixpath.dirname(name) or '.')}/"
    for name in (
        "README.md",
        "docs/distributed.md",
        "docs/getting-started.md",
        "docs/how-it-works.md",
        "docs/ladder.md",
        "docs/mla.md",
        "docs/numerics.md",
        "docs/numerics-study.md",
        "docs/performance.md",
        "docs/support.md",
        "docs/zh/README.md",
        "docs/zh/getting-started.md",
        "docs/zh/how-it-works.md",
        "docs/zh/ladder.md",
    )
}
_BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
# Commit -> kernel and head dim of its counters.
COUNTED = {
    "7fbd6cd": (("bwd/sm80", 128),),
    "8e095e9": (("fwd/sm80", 128), ("fwd/sm90", 128), ("bwd/sm90", 128), ("bwd/sm90", 256)),
}


def kernels_at(commit: str) -> str:
    """The file with the digests of the kernels at a commit, as a path from `sources.DATA`."""
    return f"{sources.RESULTS}/{kernel_changes.file_name(commit)}"


def steps_by_commit() -> dict[str, list[Step]]:
    """The runs of the documents, by their commits; the commit whose runs measure most kernels is the first."""
    found: dict[str, list[Step]] = {}
    for step in STEPS:
        record = read(newest(step.name))
        machine = record.machine if isinstance(record, Run) else record["machine"]
        found.setdefault(machine["git_commit"], []).append(step)

    def num_kernels(commit: str) -> int:
        patterns = tuple(x for step in found[commit] for x in step.kernels)
        return kernel_changes.changed(read(kernels_at(commit)), patterns)[0]

    return dict(sorted(found.items(), key=lambda item: -num_kernels(item[0])))


def kernels() -> str:
    """The commits of the measurements, and the kernels that changed since."""

    def line(what: str, commit: str, patterns: Iterable[str]) -> str:
        return f"- {what}: {kernel_changes.sentence(read(kernels_at(commit)), tuple(dict.fromkeys(patterns)))}."

    lines = []
    for commit, steps in steps_by_commit().items():
        names = ", ".join(step.name for step in steps)
        lines.append(line(names, commit, (pattern for step in steps for pattern in step.kernels)))
    what = "Counters of Nsight Compute, and wavefronts by instruction (main kernels, default layouts)"
    for commit, counted in COUNTED.items():
        names = ", ".join(f"{kernel.replace('/', '-')} D = {head_dim}" for kernel, head_dim in counted)
        patterns = [f"{kernel}/sm_90/d{head_dim}/bf16/full/plain/main" for kernel, head_dim in counted]
        lines.append(line(f"{what} of {names}", commit, patterns))
    return "\n".join(lines)


def markdown(table: Table) -> str:
    """The table without padding and title; columns of numbers are aligned to the right."""
    columns = list(zip(*table.rows))
    rule = ["---:" if all(re.match(r"[\d*-]", cell) for cell in column) else "---" for column in columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in (table.columns, rule, *table.rows))


def summary(*runs: Run) -> str:
    """The summary of all runs, a sentence about the tiles of the sm80 kernels, and one about head dims above 256."""
    *narrow, forward, backward = runs
    lines = doc_speed.tiles_line(*narrow[-2:]), doc_speed.wide_line(forward, backward)
    parts = markdown(doc_speed.summary(*narrow)), *lines
    return "\n\n".join(parts)


def wide(forward: Run, backward: Run) -> str:
    """The table of head dims above 256, and the conditions of its runs."""
    return f"{markdown(doc_speed.wide(forward, backward))}\n\n{doc_speed.wide_conditions(forward, backward)}"


def _figure(name: str, alt: str) -> Recipe:
    return Recipe(lambda: f"![{alt}](plots/{name}.svg)")


def _of_numerics(table: Callable[[Any], Table]) -> Callable[[dict[str, Any]], Table]:
    return lambda record: table(record["records"])


BLOCKS = {
    "layouts": Recipe(doc_counters.layouts, (sources.COUNTERS,)),
    "bwd_layouts": Recipe(doc_counters.bwd_layouts, (sources.COUNTERS,)),
    "limits": Recipe(doc_counters.limits, (sources.COUNTERS,)),
    "by_instruction": Recipe(doc_counters.by_instruction, (sources.BY_INSTRUCTION,)),
    "hbm_bytes": Recipe(doc_counters.hbm_bytes, (sources.COUNTERS,)),
    "beyond_l2": Recipe(doc_counters.beyond_l2, (sources.COUNTERS,)),
    "conflicts": _figure("conflicts", "Wavefronts, conflicts and time by layout"),
    "hbm": _figure("hbm", "HBM bytes, predicted and measured"),
    "distance": Recipe(doc_speed.distance, RUNS.values()),
    "summary": Recipe(summary, (*doc_speed.SUMMARY.values(), *sources.WIDE)),
    "conditions": Recipe(doc_speed.conditions, RUNS.values()),
    "kernels": Recipe(kernels),
    "memory": Recipe(doc_speed.memory, (sources.BACKWARD_SM80, sources.BACKWARD_SM80_BHSD)),
    "cells_sm90": Recipe(doc_speed.cells, (sources.FORWARD, sources.BACKWARD)),
    "tiles_sm80": Recipe(doc_speed.tiles, sources.TILES),
    "cells_a100": Recipe(partial(doc_speed.cells_with_tiles, "A100"), sources.TILES),
    "cells_99kb": Recipe(partial(doc_speed.cells_with_tiles, "L40S"), sources.TILES),
    "cells_sm80": Recipe(partial(doc_speed.cells_with_tiles, "sm80"), sources.TILES),
    "example": Recipe(doc_speed.example, (sources.FORWARD, sources.BACKWARD)),
    "accuracy": Recipe(doc_speed.accuracy, RUNS.values()),
    "accuracy_line": Recipe(doc_speed.accuracy_line, (*RUNS.values(), sources.NUMERICS_GPU)),
    "wide": Recipe(wide, sources.WIDE),
    "gqa": Recipe(doc_speed.gqa, sources.GQA),
    "features": Recipe(doc_results.features, (sources.FEATURES,)),
    "features_by_head_dim": Recipe(doc_results.features_by_head_dim, (sources.FEATURES,)),
    "support": Recipe(doc_results.support, (sources.SUPPORT,)),
    "fp32": Recipe(doc_results.fp32_speed, (sources.FP32,)),
    "fp32_line": Recipe(doc_results.fp32_line, (sources.FP32,)),
    "fp32_error_line": Recipe(doc_results.fp32_error_line, (sources.FP32,)),
    "fp32_accuracy": Recipe(doc_results.fp32_accuracy, (sources.FP32,)),
    "decode": Recipe(doc_results.decode_cells, (sources.DECODE,)),
    "decode_line": Recipe(doc_results.decode_line, (sources.DECODE,)),
    "decode_variants": Recipe(decode.variant_table, (sources.DECODE,)),
    "decode_layers": Recipe(doc_results.decode_layers, (sources.DECODE,)),
    "mla_cells": Recipe(doc_results.mla_cells, (sources.MLA,)),
    "mla_caches": Recipe(doc_results.mla_caches, (sources.MLA,)),
    "mla_line": Recipe(doc_results.mla_line, (sources.MLA,)),
    "training": Recipe(training.table, (sources.TRAINING,)),
    "training_line": Recipe(doc_results.training_line, (sources.TRAINING,)),
    "context_parallel_times": Recipe(context_parallel.table, (sources.CONTEXT_PARALLEL,)),
    "mods": Recipe(doc_results.mods, (sources.MODS,)),
    "host": Recipe(doc_results.host, (sources.HOST,)),
    "start": Recipe(doc_results.start, (sources.START,)),
    "standard": Recipe(standard_report.claims, (sources.STANDARD,)),
    "standard_figure": _figure("standard", "Standard attention over cute_flash, by length"),
    "numerics_ways": Recipe(_of_numerics(numerics_report.ways), (sources.NUMERICS_CPU,)),
    "numerics_dtypes": Recipe(_of_numerics(numerics_report.dtypes), (sources.NUMERICS_CPU,)),
    "numerics_gpu": Recipe(_of_numerics(numerics_report.gpu_out), (sources.NUMERICS_GPU,)),
    "numerics_gpu_figure": _figure("numerics-gpu", "Errors of GPU kernels by dtype and distribution"),
    "ladder_speed": Recipe(doc_ladder.speeds, (sources.LADDER,)),
    "ladder_conditions": Recipe(doc_ladder.conditions, (sources.LADDER,)),
    "ladder_figure": _figure("ladder", "TFLOP/s by rung"),
    "ladder_hbm": Recipe(doc_ladder.hbm_bytes, (sources.LADDER_COUNTERS,)),
    "ladder_wavefronts": Recipe(doc_ladder.wavefronts, (sources.LADDER_COUNTERS,)),
    "ladder_work": Recipe(doc_ladder.work, (sources.LADDER_COUNTERS,)),
    "ladder_stalls": Recipe(doc_ladder.stalls, (sources.LADDER_COUNTERS,)),
    "ladder_counted_on": Recipe(doc_ladder.counted_on, (sources.LADDER_COUNTERS,)),
    # Models, which read no file.
    "chips": Recipe(concept_tables.chips),
    "shapes": Recipe(concept_tables.shapes),
    "ladder_conflicts": Recipe(doc_ladder.conflicts),
    "loop_orders": Recipe(concept_tables.loop_orders),
    "tile_rules": Recipe(concept_tables.tile_rules),
    "context_parallel": Recipe(plot_cp.table),
    "context_parallel_ratio": Recipe(plot_cp.ratios),
    "context_parallel_figure": _figure("context-parallel", "Predicted efficiency by GPUs"),
}


def embed(text: str, folder: str = "") -> str:
    """The document with its generated blocks rewritten; `folder` is the prefix of links to files of profiling/."""

    def block(match: re.Match[str]) -> str:
        try:
            made = BLOCKS[match[2]].make()
            body = made if isinstance(made, str) else markdown(made)
        except FileNotFoundError as error:
            body = f"*Not measured yet: {error} does not exist.*"
        body = re.sub(r"\]\((?=results/|reports/|plots/)", f"]({folder}", body)
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _BLOCK.sub(block, text)


def write() -> None:
    for path, folder in DOCUMENTS.items():
        path.write_text(embed(path.read_text(encoding="utf-8"), folder), encoding="utf-8")
