"""Tables of docs/ladder.md: predicted bank conflicts, and what `python -m examples.ladder` measured and counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from profiling.documents.sources import commit_of
from profiling.measure.tables import Table, number

Record = dict[str, Any]
HEAD_DIM = 128
# Rung and order of its tiles.
TILES = (("2", "plain"), ("3", "padded"), ("3", "swizzled"))
# The last row of a direction is the kernel of cute_flash.
PRODUCTS = {"forward": "9", "backward": "B4"}
MMA_SYNC = "sm80"
# Column -> counter.
COUNTED = {
    "tensor cores": "tensor_percent",
    "FMA": "fma_percent",
    "L1 and shared memory": "lsu_data_percent",
    "exponentials": "xu_percent",
    "issue slots used": "issue_percent",
}
STALLS = {"loads from L2 or HBM": "long_scoreboard", "shared memory": "short_scoreboard"}
COPIES = "sass_ldgsts_wavefronts"
LOADS = ("sass_ldsm_wavefronts", "sass_ldsm_conflicts")
# Rungs with several kernels: what each kernel computes, in launch order.
KERNELS = {"0": ("scores", "softmax", "output"), "B1": ("dK, dV", "dQ")}
BYTES_PER_SCORE = 24  # of rung 0: fp32, written twice and read four times


def conflicts() -> Table:
    """Predicted wavefronts of shared memory for one block of keys."""
    # Imports the CuTe DSL, which takes seconds.
    from examples.ladder.__main__ import rung_class
    from examples.ladder.conflicts import uses

    rows = []
    for name, variant in TILES:
        rung = rung_class(name)(HEAD_DIM, False)
        rung.variant = variant
        found = {use.name: f"{use.wavefronts} ({use.conflicts})" for use in uses(rung)}
        rows.append((name, variant, *(found[f"{what} of K"] for what in ("copy", "ldmatrix"))))
    columns = ("rung", "tiles", "copy of a block of K", "ldmatrix of K, all warps")
    return Table("Wavefronts (of them conflicts), D = 128, predicted", columns, tuple(rows))


def speeds(record: Record) -> Table:
    """TFLOP/s of the rungs, and their share of the product's."""
    rows = []
    for name in _rungs(record):
        tflops = record["rungs"][name]["tflops"]
        product = record["rungs"][PRODUCTS["backward" if name.startswith("B") else "forward"]]["tflops"]
        cells = [f"{x:.{int(x < 10)}f} ({x / best:.0%})" for x, best in zip(tflops, product, strict=True)]
        rows.append((name.replace(MMA_SYNC, "with mma.sync"), *cells))
    return Table("", ("rung", *(f"D = {case}" for case in record["cases"])), tuple(rows))


def conditions(record: Record) -> str:
    """The problem and the machine of the speeds."""
    machine = record["machine"]
    return (
        f"{machine['gpu']}, bf16, B = {record['batch']}, H = {record['heads']}, S = {record['seqlen']}, device time by "
        f"CUDA graphs, {machine['date'][:10]}, commit {commit_of(machine)}. The FLOPs of a causal mask are half of "
        "those without one, also of rungs that compute all of them. Times of the backward include setting dQ to zero; "
        "B1 to B3 get delta from the caller, and B4 computes it."
    )


def hbm_bytes(record: Record) -> Table:
    """Bytes of HBM at two lengths: those of rung 0 grow with the square."""
    shape = record["shape"]
    rows = []
    for name in ("0", "1"):
        for key, seqlen in ((name, shape["seqlen"]), (f"{name} S={2 * shape['seqlen']}", 2 * shape["seqlen"])):
            heads = shape["batch"] * shape["heads"]
            inputs = 4 * heads * seqlen * shape["head_dim"] * 2
            predicted = inputs + (BYTES_PER_SCORE * heads * seqlen**2 if name == "0" else 0)
            measured = sum(_kernel["dram_read_bytes"] + _kernel["dram_write_bytes"] for _kernel in _of(record, key))
            rows.append((name, f"{seqlen}", f"{predicted / 1e6:,.0f}", f"{measured / 1e6:,.0f}"))
    return Table("", ("rung", "S", "predicted, MB", "measured, MB"), tuple(rows))


def wavefronts(record: Record) -> Table:
    """Wavefronts of shared memory, measured and predicted, in millions."""

    def cell(kernel: Record, predicted: Record, name: str) -> str:
        both = (None if x is None else x / 1e6 for x in (kernel.get(name), predicted.get(name)))
        return " / ".join(number(x, ".2f") for x in both)

    rows = []
    for name, predicted in sorted(record["predicted"].items()):
        # The prediction of a rung with two kernels is for the first one.
        for label, kernel, of_kernel in zip(_labels(name), _of(record, name), (predicted, {})):
            rows.append((label, *(cell(kernel, of_kernel, key) for key in (*LOADS, COPIES))))
    columns = ("rung", "ldmatrix", "conflicts of ldmatrix", "cp.async")
    return Table("", columns, tuple(rows))


def work(record: Record) -> Table:
    """Time, instructions and busy units of the kernels of all rungs."""
    shape = record["shape"]
    scores = shape["batch"] * shape["heads"] * shape["seqlen"] ** 2
    rows = []
    for name in _plain(record):
        for label, kernel in zip(_labels(name), _of(record, name), strict=True):
            units = [f"{kernel[counter]:.0f} %" for counter in COUNTED.values()]
            per_score = f"{kernel['instructions'] * 32 / scores:.1f}"
            rows.append((label, f"{kernel['duration_ns'] / 1e3:,.0f}", per_score, *units))
    return Table("", ("rung", "time, µs", "instructions of a thread per score", *COUNTED), tuple(rows))


def stalls(record: Record) -> Table:
    """Cycles that a warp waits for each instruction that it issues, by reason."""
    rows = []
    for name in _plain(record):
        for label, kernel in zip(_labels(name), _of(record, name), strict=True):
            found = kernel["stalls"]
            rows.append((label, *(number(found.get(reason, 0.0), ".2f") for reason in STALLS.values())))
    return Table("", ("rung", *STALLS), tuple(rows))


def counted_on(record: Record) -> str:
    """The problem and the machine of the counters."""
    shape, machine = record["shape"], record["machine"]
    return (
        f"Nsight Compute on {machine['gpu']}, B = {shape['batch']}, H = {shape['heads']}, S = {shape['seqlen']}, "
        f"D = {shape['head_dim']}, without a mask, {machine['date'][:10]}, commit {commit_of(machine)}."
    )


def _of(record: Record, name: str) -> list[Record]:
    """The counters of the kernels of a rung, in the order of their launches."""
    kernels = record["rungs"][name]
    return [kernels[key] for key in sorted(kernels, key=lambda key: int(key.rpartition("_")[2]))]


def _labels(name: str) -> list[str]:
    """A label for each kernel of a rung: the rung's name, and the result of the kernel if the rung has several."""
    return [" ".join((name, what)) for what in KERNELS[name]] if name in KERNELS else [name]


def _plain(record: Record) -> list[str]:
    """The names of the unmodified rungs at the common length: not "3 padded" or "0 S=4096"."""
    return [name for name in sorted(record["rungs"]) if " " not in name]


def _rungs(record: Record) -> Iterable[str]:
    return sorted(record["rungs"])
