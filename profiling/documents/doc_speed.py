"""Tables of speed and accuracy beside other libraries, from runs of `python -m profiling bench`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

from profiling.bench.report import NOISY_SPREAD, NORMS
from profiling.documents import sources
from profiling.measure.record import Cell, Run
from profiling.measure.shapes import MASKS, Shape
from profiling.measure.tables import Table, geometric_mean, number
from profiling.studies.numerics_report import worst_over

# The functions of this file with the argument `runs` take these, in this order.
RUNS = {
    "forward sm90": sources.FORWARD,
    "forward sm80": sources.FORWARD_SM80,
    "backward sm90": sources.BACKWARD,
    "backward sm80": sources.BACKWARD_SM80,
}
# GPU in the name of a provider -> the GPUs that take its tiles.
TILES = {"A100": "A100", "L40S": "99 KB of shared memory: A10, RTX 30 and 40, L40S", "sm80": "Hopper"}
# Rows of the summary. The sm80 kernels have the tiles of an A100.
SUMMARY = {
    "forward sm90": sources.FORWARD,
    "backward sm90": sources.BACKWARD,
    "forward sm80, tiles of an A100": sources.TILES[0],
    "backward sm80, tiles of an A100": sources.TILES[1],
}
# The shortest and the longest sequence of the papers, and one between.
LENGTHS = (512, 2048, 16384)
SHORT = 1024
PEERS = {"sdpa-flash": "FA2", "sdpa-cudnn": "cuDNN", "sdpa-efficient": "memory-efficient", "fa3": "FA3", "fa4": "FA4"}
# Row -> its run, the distribution of the inputs, the peer, and the peer's name in the text.
ACCURACY = {
    "forward sm90": ("forward sm90", "normal", "fa3", "FlashAttention-3"),
    "forward sm90, inputs with outliers": ("forward sm90", "outliers", "fa3", "FlashAttention-3"),
    "forward sm80": ("forward sm80", "normal", "sdpa-flash", "FlashAttention-2"),
    "backward sm90": ("backward sm90", "normal", "fa3", "FlashAttention-3"),
    "backward sm80": ("backward sm80", "normal", "sdpa-flash", "FlashAttention-2"),
}
# Head dims above 256: names in the runs -> columns of the table.
WIDE = {"cute_flash": "cute_flash", "cute_flash-sm80": "mma.sync", "ffpa": "FFPA"}
WIDEST, NARROWEST = 512, 320


def _by_shape(run: Run) -> dict[tuple[int, str, int], Cell]:
    """Head dim, mask and length -> cell."""
    return {(cell.shape.head_dim, cell.shape.mask, cell.shape.seqlen): cell for cell in run.cells}


def _head_dims(run: Run) -> list[int]:
    return sorted({cell.shape.head_dim for cell in run.cells})


def _lengths(run: Run) -> list[int]:
    return sorted({cell.shape.seqlen for cell in run.cells})


def _over_best(run: Run, cells: Iterable[Cell]) -> list[float]:
    """Our speed over that of the fastest peer with correct results, in each cell."""
    return [ratio for cell in cells if (ratio := run.over_best(cell)) is not None]


def _mean(run: Run, cells: Iterable[Cell]) -> str:
    return number(geometric_mean(_over_best(run, cells)))


def distance(*runs: Run) -> Table:
    """TFLOP/s, and their ratio to cuBLAS in the same run."""
    rows = []
    for (label, path), run in zip(RUNS.items(), runs, strict=True):
        cells, ceiling = _by_shape(run), run.ceiling and run.ceiling.tflops
        for head_dim in _head_dims(run):
            shapes = [(head_dim, mask, length) for mask in MASKS for length in LENGTHS]
            found = [cells[shape] for shape in shapes if shape in cells]
            speeds = [(cell.tflops(run.ours[0]), cell.ceiling_tflops or ceiling) for cell in found]
            texts = [f"{speed:.0f} ({speed / product:.0%})" if speed and product else "-" for speed, product in speeds]
            rows.append((f"[{label}]({path}), {head_dim}", *texts))
    columns = [f"{mask} {length}" for mask in MASKS for length in LENGTHS]
    return Table("", ("kernel, D", *columns), tuple(rows))


def summary(*runs: Run) -> Table:
    """One line per run: geometric means of the ratio to the best peer of each cell."""
    rows = []
    for (label, path), run in zip(SUMMARY.items(), runs, strict=True):
        run = run if len(run.ours) == 1 else with_tiles(run, "A100")
        ratios = _over_best(run, run.cells)
        dims = [_mean(run, (cell for cell in run.cells if cell.shape.head_dim == d)) for d in (64, 128, 256)]
        short = _mean(run, (cell for cell in run.cells if cell.shape.seqlen <= SHORT))
        peers = ", ".join(PEERS[peer] for peer in run.peers)
        reach = f"{min(ratios):.2f} to {max(ratios):.2f}"
        mean, commit = f"**{_mean(run, run.cells)}**", f"`{sources.commit_of(run.machine)}`"
        rows.append((f"[{label}]({path})", peers, mean, reach, *dims, short, commit))
    columns = ("kernel", "best of", "mean of 36 cells", "lowest to highest", "D = 64", "128", "256")
    return Table("", (*columns, f"S ≤ {SHORT}", "commit"), tuple(rows))


def conditions(*runs: Run) -> str:
    """Versions of the libraries, and cells with a power cap or a large spread of rounds."""
    machine = next(run.machine for run in runs if "fa3" in run.peers)
    cudnn, fa3 = machine["cudnn"], machine["flash_attn_3"]
    capped = [sum("sw_power_cap" in cell.after["clock_reasons"] for cell in run.cells) for run in runs]
    noisy = [sum((cell.results[run.ours[0]].spread or 0.0) > NOISY_SPREAD for cell in run.cells) for run in runs]

    def counts(numbers: Iterable[int]) -> str:
        return ", ".join(f"{label} {count}" for label, count in zip(RUNS, numbers, strict=True))

    return "\n".join(
        (
            f"- Versions: torch {machine['torch']} with its FlashAttention-2, cuDNN {cudnn // 10000}."
            f"{cudnn // 100 % 100}.{cudnn % 100}, FlashAttention-3 ({fa3['origin']}, SHA-256 {fa3['digest']}), "
            f"FlashAttention-4 {machine['flash_attn_4']}, driver {machine['driver']}.",
            f"- Cells, of 36, in which the card reported its power cap: {counts(capped)}.",
            f"- Cells in which rounds of cute_flash differ by over {100 * NOISY_SPREAD:.0f} %: {counts(noisy)}.",
        )
    )


def memory(bshd: Run, bhsd: Run) -> str:
    """The sm80 backward over FlashAttention-2 in both memory layouts, and the time that (B, H, S, D) adds to each.

    Both numbers are of the cells of the run in (B, H, S, D) memory.
    """
    ours, peer = bshd.ours[0], bshd.reference
    measured = {cell.key for cell in bhsd.cells}
    bshd = replace(bshd, cells=tuple(cell for cell in bshd.cells if cell.key in measured))
    before = {cell.key: cell.results for cell in bshd.cells}

    def added(name: str) -> str:
        pairs = [(before[cell.key][name].ms, cell.results[name].ms) for cell in bhsd.cells]
        values = [after - first for first, after in pairs if first is not None and after is not None]
        low, high, middle = (round(1e3 * value) for value in (min(values), max(values), median(values)))
        return f"{low} to {high} µs (median {middle})"

    text = (
        f"In {len(bhsd.cells)} cells the sm80 backward is {_mean(bshd, bshd.cells)} × as fast as "
        "FlashAttention-2 on (B, S, H, D) "
        f"memory and {_mean(bhsd, bhsd.cells)} × on (B, H, S, D) memory ([run]({sources.BACKWARD_SM80_BHSD})). "
        f"(B, H, S, D) memory adds {added(peer)} to a call of FlashAttention-2 through SDPA, and "
        f"{added(ours)} to a call of cute_flash."
    )
    return re.sub(r" -(?=\d)", " −", text)


def cells(forward: Run, backward: Run) -> Table:
    """TFLOP/s, and the speed over the best peer, in every cell of a run of each direction."""
    rows = []
    for label, run in (("forward", forward), ("backward", backward)):
        at = _by_shape(run)
        for head_dim, mask in product(_head_dims(run), MASKS):
            row = [at[head_dim, mask, length] for length in _lengths(run)]
            texts = [f"{number(cell.tflops(run.ours[0]), ',.0f')} ({_mean(run, [cell])})" for cell in row]
            rows.append((f"{label}, D = {head_dim}, {mask}", *texts))
    return Table("", ("TFLOP/s (speed-up)", *(f"S = {length}" for length in _lengths(backward))), tuple(rows))


def wide(forward: Run, backward: Run) -> Table:
    """Head dims above 256: TFLOP/s of cute_flash, of its mma.sync kernels and of FFPA, and the first over the last."""
    runs = {"forward": forward, "backward": backward}
    at = [_by_shape(run) for run in runs.values()]
    rows = []
    for head_dim, mask, length in product(_head_dims(forward), MASKS, _lengths(forward)):
        texts = []
        for run, cells in zip(runs.values(), at, strict=True):
            cell = cells[head_dim, mask, length]
            texts += [number(cell.tflops(name), ".0f") for name in WIDE]
            texts.append(f"**{number(cell.ratio(run.ours[0], run.reference))}**")
        rows.append((f"{head_dim}, {mask}", f"{length}", *texts))
    columns = [f"{label}, {name}" for label in runs for name in (*WIDE.values(), "over FFPA")]
    return Table("", ("D", "S", *columns), tuple(rows))


def _over_ffpa(run: Run, name: str, head_dim: int) -> str:
    """The lowest and the highest speed over FFPA among the cells of a head dim."""
    cells = [cell for cell in run.cells if cell.shape.head_dim == head_dim]
    ratios = [ratio for cell in cells if (ratio := cell.ratio(name, run.reference)) is not None]
    return f"{min(ratios):.2f} to {max(ratios):.2f} ×"


def wide_line(forward: Run, backward: Run) -> str:
    """Two sentences on head dims above 256: the speed at the widest, and which libraries stop at 256."""
    faster, back = (_over_ffpa(run, run.ours[0], WIDEST) for run in (forward, backward))
    return (
        f"Head dims go up to {WIDEST}, forward and backward. At D = {WIDEST}, the forward is {faster} and the backward "
        f"{back} as fast as FFPA {forward.machine['ffpa']} (B = 1, H = 32, S = 4096 and 16384; "
        f"[forward]({sources.WIDE[0]}), [backward]({sources.WIDE[1]})). On Hopper, FA2, FA3, FA4 and torch's flash "
        "backend stop at D = 256."
    )


def wide_conditions(forward: Run, backward: Run) -> str:
    """Versions, power cap, spread of rounds and errors of the runs of head dims above 256."""
    runs = {"forward": forward, "backward": backward}
    machine, lines = forward.machine, []
    lines.append(
        f"- [Forward]({sources.WIDE[0]}) and [backward]({sources.WIDE[1]}) at commit `{sources.commit_of(machine)}`; "
        f"FFPA {machine['ffpa']} through its CuTe DSL backend, torch {machine['torch']}."
    )
    for label, run in runs.items():
        capped = sum("sw_power_cap" in cell.after["clock_reasons"] for cell in run.cells)
        spreads = {name: max(cell.results[name].spread or 0.0 for cell in run.cells) for name in WIDE}
        differ = ", ".join(f"{WIDE[name]} {spread:.0%}" for name, spread in spreads.items())
        lines.append(
            f"- Cells of the {label} in which the card reported its power cap: {capped} of {len(run.cells)}. The "
            f"largest difference of rounds in a cell: {differ}."
        )
    worst = [max(worst_errors(run, "normal", run.reference).values()) for run in runs.values()]
    lines.append(
        "- Errors against fp64 (relative Frobenius norm) are at most "
        f"{worst[0]:.2f} × those of FFPA for the output and {worst[1]:.2f} × for dq, dk and dv."
    )
    lines.append(
        f"- The mma.sync backward at D = {NARROWEST} is {_over_ffpa(backward, 'cute_flash-sm80', NARROWEST)} as fast "
        "as FFPA."
    )
    return "\n".join(lines)


def with_tiles(run: Run, gpu: str) -> Run:
    """A run of the sm80 kernels whose first provider has the tiles of a GPU; "sm80": those of the GPU of the run."""
    name = f"cute_flash-{gpu}"
    return replace(run, ours=(name, *(other for other in run.ours if other != name)))


def cells_with_tiles(gpu: str, forward: Run, backward: Run) -> Table:
    """`cells` of the sm80 kernels with the tiles of a GPU."""
    return cells(with_tiles(forward, gpu), with_tiles(backward, gpu))


def tiles(forward: Run, backward: Run) -> Table:
    """The speed of the sm80 kernels over FlashAttention-2, with the tiles of each GPU."""
    rows = []
    for (gpu, name), (label, run) in product(TILES.items(), (("forward", forward), ("backward", backward))):
        own = with_tiles(run, gpu)
        ratios = _over_best(own, own.cells)
        dims = [_mean(own, (cell for cell in own.cells if cell.shape.head_dim == d)) for d in (64, 128, 256)]
        short = _mean(own, (cell for cell in own.cells if cell.shape.seqlen <= SHORT))
        reach, slower = f"{min(ratios):.2f} to {max(ratios):.2f}", sum(ratio < 1 for ratio in ratios)
        rows.append((name, label, f"**{_mean(own, own.cells)}**", reach, *dims, short, str(slower)))
    columns = ("tiles of", "", "mean", "lowest to highest", "D = 64", "128", "256", f"S ≤ {SHORT}", "cells below 1")
    return Table("", columns, tuple(rows))


def tiles_line(forward: Run, backward: Run) -> str:
    """A sentence about the tiles of the sm80 kernels: those of the summary, and the speed with other tiles."""

    def means(gpu: str) -> str:
        runs = [with_tiles(run, gpu) for run in (forward, backward)]
        slower = sum(ratio < 1 for run in runs for ratio in _over_best(run, run.cells))
        below = f" ({slower} of {sum(len(run.cells) for run in runs)} cells are below 1)" if slower else ""
        return f"{' and '.join(_mean(run, run.cells) for run in runs)}{below}"

    return (
        "The sm80 rows ran on the H200 with the tiles that an A100 takes. With the tiles of GPUs that have 99 KB of "
        f"shared memory (A10, RTX 30 and 40, L40S), forward and backward have {means('L40S')}, with those of Hopper "
        f"{means('sm80')}. FA2 always has the tiles that it takes on an H200."
    )


def example(forward: Run, backward: Run) -> str:
    """The time of a shape that was not measured, from the TFLOP/s of its cell."""
    shape = Shape(batch=2, heads=32, heads_kv=32, seqlen=8192, head_dim=128, causal=True)
    times = []
    for label, direction, run in (("forward", "fwd", forward), ("backward", "bwd", backward)):
        tflop = shape.flops(direction) / 1e12
        speed = _by_shape(run)[shape.head_dim, shape.mask, shape.seqlen].tflops(run.ours[0])
        if speed:
            times.append(f"{label} {tflop:.2f} TFLOP at {speed:.0f} TFLOP/s, {1e3 * tflop / speed:.1f} ms")
    sizes = f"B = {shape.batch}, H = {shape.heads}, S = {shape.seqlen}, D = {shape.head_dim}, {shape.mask}"
    return f"Example: {sizes}: {'; '.join(times)}."


def gqa(*runs: Run) -> Table:
    """Grouped heads: the speed over FlashAttention-3 and over cuDNN."""
    rows = []
    for path, run in zip(sources.GQA, runs, strict=True):
        shape = run.cells[0].shape
        for mask in MASKS:
            row = [_by_shape(run)[shape.head_dim, mask, length] for length in _lengths(run)]
            texts = [" / ".join(number(cell.ratio("cute_flash", x)) for x in ("fa3", "sdpa-cudnn")) for cell in row]
            rows.append((f"[{shape.heads} on {shape.heads_kv} heads]({path}), {mask}", *texts))
    return Table(
        "", ("over FlashAttention-3 / cuDNN", *(f"S = {length}" for length in _lengths(runs[-1]))), tuple(rows)
    )


def worst_errors(run: Run, distribution: str, peer: str, norm: str = "relative") -> dict[str, float]:
    """Result (out, dq, dk or dv) -> the largest ratio of our error to the peer's, both against fp64."""
    worst = {}
    for label in sorted({label for cell in run.cells for label in cell.yardstick}):
        inputs, _, gradient = label.partition(" ")
        if inputs == distribution:
            ratios = [cell.error_ratio(run.ours[0], peer, label, norm) for cell in run.cells]
            worst[gradient or "out"] = max(ratio for ratio in ratios if ratio is not None)
    return worst


def accuracy(*runs: Run) -> Table:
    by_label, rows = dict(zip(RUNS, runs, strict=True)), []
    for row, (label, distribution, peer, name) in ACCURACY.items():
        found = [worst_errors(by_label[label], distribution, peer, norm) for norm in NORMS]
        texts = [", ".join(f"{result} {ratio:.2f}" for result, ratio in worst.items()) for worst in found]
        rows.append((f"[{row}]({RUNS[label]})", name, *texts))
    norms = ("largest ratio, relative Frobenius norm", "largest ratio, largest element")
    return Table("", ("kernel", "error over that of", *norms), tuple(rows))


def accuracy_line(*files: Any) -> str:
    """The accuracy of the forward and the backward in four sentences. The last file is the numerics study's."""
    *runs, numerics = files
    study = [worst_over(numerics["records"], "sdpa-flash", norm)["out"] for norm in ("relative", "max_abs")]
    by_label = dict(zip(RUNS, runs, strict=True))
    worst, element = (
        {
            row: max(worst_errors(by_label[label], distribution, peer, norm).values())
            for row, (label, distribution, peer, _) in ACCURACY.items()
        }
        for norm in ("relative", "max_abs")
    )
    forward = max(worst["forward sm90"], worst["forward sm90, inputs with outliers"])
    ampere = max(worst["forward sm80"], worst["backward sm80"])
    return (
        f"On the same inputs, errors against fp64 (relative Frobenius norm) are at most {forward:.2f} × those of "
        f"FlashAttention-3 for the output and {worst['backward sm90']:.2f} × for dq, dk and dv. Errors of the sm80 "
        f"kernels are at most {ampere:.2f} × those of FlashAttention-2. The largest error of a single element is at "
        f"most {max(element.values()):.2f} × the peer's. In the numerics study, on sequences of up to 16384 tokens "
        f"with outliers, errors of the output are at most {study[0]:.2f} × those of FlashAttention-2, and of an "
        f"element {study[1]:.2f} × ([data]({sources.NUMERICS_GPU}))."
    )
