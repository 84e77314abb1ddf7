"""The output of commands in two columns: labels and texts, and what the labels of `cute-flash explain` mean."""

from __future__ import annotations

LABEL_WIDTH = 12
# Labels of the lines that `explain --short` prints.
SHORT = frozenset(("problem", "GPU", "kernel", "tile", "splits", "work", "traffic", "time"))
# The meaning of each line of `explain`, by its label.
LEGEND = {
    "problem": "B batch, H and Hkv query and K/V heads, Sq queries, Sk keys, D head dim (D/Dv if they differ), mask",
    "call": "the function that computes it",
    "cache": "dtype of the K/V cache, and whether it has pages",
    "GPU": "name, architecture, streaming multiprocessors (SMs)",
    "kernel": "fwd_sm80 uses mma.sync, fwd_sm90 wgmma and TMA, decode* and fwd_split_kv split the keys among CTAs",
    "tile": "queries x keys x head dim that a CTA (thread block) computes at once; stages are K/V blocks in flight",
    "shared": "shared memory of a CTA, and of an SM",
    "grid": "CTAs launched, tiles of queries, and heads whose K and V stay in L2 together",
    "splits": "CTAs that share the keys of a tile, whose results are merged; groups of heads read the same keys",
    "work": "FLOPs of QK^T and PV, and exponentials of the softmax, of the visible (query, key) pairs",
    "K/V": "bytes of the visible keys and values, read once",
    "traffic": "bytes if every tensor is read or written once; unfused: attention that also stores the scores",
    "intensity": "FLOPs per byte; above the ridge of the GPU, tensor cores take longer than the memory",
    "pieces": "bytes that fp32 kernels move to split each element into two fp16 numbers",
    "tensor": "time of the tensor cores alone",
    "memory": "time of the GPU's memory alone",
    "exp2": "time of the units that compute exponentials alone",
    "bound": "the slowest of the three: a lower bound of the time on any grid, the roofline",
    "occupancy": "SMs that have work, and rows of the tiles that are no padding",
    "units": "times of this grid: those of the SM with the most work, and that of the memory",
    "time": "the largest of the units: a lower bound of the time with this grid",
    "re-reads": "bytes if L2 served no read of K and V, and the intensity then",
    "rescales": "a rescale multiplies the sums of a row if its maximum grows; at most one per K/V block but the first",
    "SRAM": "on-chip memory of a tile by the formula of the FlashAttention papers",
}


def aligned(lines: list[str]) -> list[str]:
    """Align the texts of "label  text" lines in one column."""
    return [f"{label:<{LABEL_WIDTH}}{text}" for label, text in (line.split(None, 1) for line in lines)]


def shortened(lines: list[str]) -> list[str]:
    """The aligned lines of `SHORT`."""
    return [line for line in lines if line[:LABEL_WIDTH].strip() in SHORT]


def legend(lines: list[str]) -> list[str]:
    """What the labels of aligned lines mean, once each."""
    labels = dict.fromkeys(line[:LABEL_WIDTH].strip() for line in lines)
    return aligned([f"{label} {LEGEND[label]}" for label in labels if label in LEGEND])
