"""Tables of the documents from single runs, such as accuracy, fp32, decoding, training, mods and host time."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from profiling.bench.report import NORMS
from profiling.documents.figures import BACKWARD, BACKWARD_SM80, FORWARD, FORWARD_SM80, newest
from profiling.measure.record import Run, load
from profiling.measure.shapes import MASKS
from profiling.measure.tables import Table, geometric_mean
from profiling.studies import context_parallel, decode, decode_cases, fp32, training

GQA = newest("fwd-sm90-gqa"), newest("fwd-sm90-gqa8")
MODS, HOST, FP32, DECODE = newest("mods"), newest("host"), newest("fp32"), newest("decode")
TRAINING, CONTEXT_PARALLEL = newest("training"), newest("context-parallel")
# Kernel -> the result file, the distribution of the inputs, the peer, and the peer's name in the text.
ACCURACY = {
    "forward sm90": (FORWARD, "normal", "fa3", "FlashAttention-3"),
    "forward sm90, inputs with outliers": (FORWARD, "outliers", "fa3", "FlashAttention-3"),
    "forward sm80": (FORWARD_SM80, "normal", "sdpa-flash", "FlashAttention-2"),
    "backward sm90": (BACKWARD, "normal", "fa3", "FlashAttention-3"),
    "backward sm80": (BACKWARD_SM80, "normal", "sdpa-flash", "FlashAttention-2"),
}
# Table row -> kind of the cells, and the names of our side and of the other side in the result file.
MOD_ROWS = {
    "six mods, over FlexAttention": ("function", "cute_flash", "flex"),
    "six mods, over FlashAttention-4": ("function", "cute_flash", "fa4"),
    "eight documents with a block mask, over the same without": (
        "documents",
        "with a block mask",
        "without a block mask",
    ),
    "the same, over FlexAttention": ("documents", "with a block mask", "flex"),
    "the same, over FlashAttention-4": ("documents", "with a block mask", "fa4"),
    "bias (B, H, S, S), over no bias": ("bias", "bias of all", "plain"),
    "the same bias and its gradient, over no bias": ("bias", "bias of all and its gradient", "plain"),
    "bias (1, H, S, S), over no bias": ("bias", "bias of each head", "plain"),
    "this bias and its gradient, over no bias": ("bias", "bias of each head and its gradient", "plain"),
    "bias (B, 1, 1, S), over no bias": ("bias", "bias of each key", "plain"),
}
HOST_ROWS = {
    "plain-fwd": "forward",
    "plain-train": "forward, gradients recorded",
    "plain-bwd": "backward",
    "softcap-fwd": "forward, softcap",
    "alibi-fwd": "forward, ALiBi",
    "score_mod-fwd": "forward, score_mod",
    "varlen-fwd": "forward, varlen",
}


def _worst(run: Run, distribution: str, peer: str, norm: str = "relative") -> dict[str, float]:
    """Result (out, dq, dk or dv) -> the largest ratio of our error to the peer's, both against fp64."""
    worst = {}
    for label in sorted({label for cell in run.cells for label in cell.yardstick}):
        inputs, _, gradient = label.partition(" ")
        if inputs == distribution:
            ratios = [cell.error_ratio(run.ours[0], peer, label, norm) for cell in run.cells]
            worst[gradient or "out"] = max(ratio for ratio in ratios if ratio is not None)
    return worst


def accuracy(data: Path) -> Table:
    rows = []
    for kernel, (path, distribution, peer, name) in ACCURACY.items():
        run = load(data / path)
        found = [_worst(run, distribution, peer, norm) for norm in NORMS]
        texts = [", ".join(f"{result} {ratio:.2f}" for result, ratio in worst.items()) for worst in found]
        rows.append((f"[{kernel}]({path})", name, *texts))
    norms = ("largest ratio, relative Frobenius norm", "largest ratio, largest element")
    return Table("", ("kernel", "error over that of", *norms), tuple(rows))


def accuracy_line(data: Path) -> str:
    """The accuracy of the forward and the backward in three sentences."""

    def worst_of(kernel: str, norm: str = "relative") -> float:
        path, distribution, peer, _ = ACCURACY[kernel]
        return max(_worst(load(data / path), distribution, peer, norm).values())

    worst = {kernel: worst_of(kernel) for kernel in ACCURACY}
    forward = max(worst["forward sm90"], worst["forward sm90, inputs with outliers"])
    ampere = max(worst["forward sm80"], worst["backward sm80"])
    element = max(worst_of(kernel, "max_abs") for kernel in ACCURACY)
    return (
        f"On the same inputs, errors against fp64 (relative Frobenius norm) are at most {forward:.2f} × those of "
        f"FlashAttention-3 for the output and {worst['backward sm90']:.2f} × for dq, dk and dv. Errors of the sm80 "
        f"kernels are at most {ampere:.2f} × those of FlashAttention-2. The largest error of a single element is at "
        f"most {element:.2f} × the peer's."
    )


def _read_fp32(data: Path) -> dict[str, Any]:
    return json.loads((data / FP32).read_text(encoding="utf-8"))


def fp32_speed(data: Path) -> Table:
    """fp32: the speed over torch's EFFICIENT_ATTENTION, cell by cell."""
    cells = _read_fp32(data)["cells"]
    lengths = sorted({cell["shape"]["seqlen"] for cell in cells})
    rows = []
    for direction, label in (("fwd", "forward"), ("bwd", "backward")):
        for head_dim in sorted({cell["shape"]["head_dim"] for cell in cells}):
            of_row = partial(fp32.ratios, cells, fp32.EFFICIENT, direction=direction, head_dim=head_dim)
            pairs = [[of_row(seqlen=length, causal=causal) for causal in (False, True)] for length in lengths]
            texts = [" / ".join(f"{x[0]:.2f}" if x else "-" for x in pair) for pair in pairs]
            rows.append((f"[{label}]({FP32}), D = {head_dim}", *texts, f"**{geometric_mean(of_row()):.2f}**"))
    return Table("", ("full / causal", *(f"S = {length}" for length in lengths), "mean"), tuple(rows))


def fp32_line(data: Path) -> str:
    """fp32: geometric means in two sentences."""
    record = _read_fp32(data)
    means = {
        (direction, other): fp32.ratios(record["cells"], other, direction=direction)
        for direction in fp32.DIRECTIONS
        for other in (fp32.EFFICIENT, fp32.MATH)
    }
    texts = {key: f"{geometric_mean(values):.2f} × ({min(values):.2f} or more)" for key, values in means.items()}
    return (
        f"Geometric means: {texts['fwd', fp32.EFFICIENT]} the speed of EFFICIENT_ATTENTION forward and "
        f"{texts['bwd', fp32.EFFICIENT]} backward; {texts['fwd', fp32.MATH]} and {texts['bwd', fp32.MATH]} that of "
        f"MATH, up to S = {fp32.MATH_LENGTH}. Commit `{record['machine']['git_commit'][:7]}`."
    )


def fp32_accuracy(data: Path) -> Table:
    """fp32: the worst errors against fp64, by distribution of the inputs and result."""
    record = _read_fp32(data)
    rows = []
    for distribution in fp32.DISTRIBUTIONS:
        for output in fp32.OUTPUTS:
            worst = {norm: fp32.worst_errors(record, distribution, output, norm) for norm in ("max", "relative")}
            sides = (fp32.OURS, fp32.EFFICIENT, fp32.MATH)
            texts = [" / ".join(f"{worst[norm][side]:.1e}" for side in sides) for norm in worst]
            rows.append((f"{distribution}, {output}", *texts))
    columns = ("inputs, result", "largest element: cute_flash / EFFICIENT / MATH", "norm, relative: the same")
    return Table("", columns, tuple(rows))


def fp32_error_line(data: Path) -> str:
    """fp32: the largest ratios of our worst error to MATH's, over distributions and results."""
    record = _read_fp32(data)
    texts = []
    for norm, label in (("max", "largest element"), ("relative", "norm")):
        ratios = {}
        for distribution, output in product(fp32.DISTRIBUTIONS, fp32.OUTPUTS):
            worst = fp32.worst_errors(record, distribution, output, norm)
            ratios[f"{output}; inputs: {distribution}"] = worst[fp32.OURS] / worst[fp32.MATH]
        where = max(ratios, key=lambda name: ratios[name])
        texts.append(f"{ratios[where]:.2f} for the {label} ({where})")
    return f"The worst error of cute_flash, divided by that of MATH in the same row, is at most {' and '.join(texts)}."


def _read_decode(data: Path) -> dict[str, Any]:
    return json.loads((data / DECODE).read_text(encoding="utf-8"))


def decode_cells(data: Path) -> Table:
    """Decoding: time and bandwidth of cute_flash, times of the peers, and the speed over the best of them."""
    rows = []
    for cell in _read_decode(data)["cells"]:
        sides, ratio = cell["sides"], decode.over_best(cell)
        ours = sides[decode.OURS]
        peers = [f"{sides[name]['us']:.1f}" if name in sides else "-" for name in decode.PEERS]
        over = "-" if ratio is None else f"**{ratio:.2f}**"
        lengths = f"{cell['batch']}", f"{cell['length']:,}"
        rows.append((*lengths, f"{ours['us']:.1f}", f"{ours['tbps']:.2f}", *peers, over))
    columns = ("cute_flash, µs", "TB/s", "cuDNN, µs", "FlashAttention-2, µs", "FlashAttention-3, µs")
    return Table("", ("B", "keys", *columns, "over the best peer"), tuple(rows))


def decode_variants(data: Path) -> Table:
    """Decoding: the speed of each variant over the plain call."""
    return decode.variant_table(_read_decode(data))


def decode_line(data: Path) -> str:
    """Decoding: geometric means in one sentence."""
    record = _read_decode(data)
    few, every = decode.ratios(record, decode.SMALL_BATCH), decode.ratios(record)
    return (
        f"Geometric means of the speed over the best peer: {geometric_mean(few):.2f} × for B ≤ {decode.SMALL_BATCH}, "
        f"{geometric_mean(every):.2f} × for all cells ({min(every):.2f} or more). "
        f"Commit `{record['machine']['git_commit'][:7]}` ([data]({DECODE}))."
    )


def decode_layers(data: Path) -> str:
    """Decoding: gaps in a CUDA graph of all layers, and host time, in two sentences."""
    record = _read_decode(data)
    gaps = [
        f"{cell['idle_us']:.1f} of {cell['span_us']:,.0f} µs at B = {cell['batch']}, {cell['length']:,} keys"
        for cell in record["layers"]
    ]
    host = record["host"]["us"]
    others = f"SDPA with cuDNN {host[decode_cases.CUDNN]:.0f} µs, FlashAttention-3 {host[decode_cases.FA3]:.0f} µs"
    return (
        f"In a CUDA graph of {record['layers'][0]['layers']} layers, each with its own cache, the GPU is idle for "
        f"{' and '.join(gaps)}. Host time of a warm call: {host[decode.OURS]:.0f} µs; {others}."
    )


def training_steps(data: Path) -> Table:
    """Training steps: tokens per second through each integration and through other libraries."""
    return training.table(json.loads((data / TRAINING).read_text(encoding="utf-8")))


def training_line(data: Path) -> str:
    """Training steps: the integrations over the fastest other library, in two sentences."""
    record = json.loads((data / TRAINING).read_text(encoding="utf-8"))
    return f"{training.summary(record)} Commit `{record['machine']['git_commit'][:7]}` ([data]({TRAINING}))."


def context_parallel_times(data: Path) -> Table:
    """Context parallelism on one card: the sum over ranks beside the unsharded call, measured and predicted."""
    return context_parallel.table(json.loads((data / CONTEXT_PARALLEL).read_text(encoding="utf-8")))


def gqa(data: Path) -> Table:
    """Grouped heads: the speed over FlashAttention-3 and over cuDNN."""
    rows = []
    lengths: list[int] = []
    for path in GQA:
        run = load(data / path)
        lengths = sorted({cell.shape.seqlen for cell in run.cells})
        heads = f"[{run.cells[0].shape.heads} on {run.cells[0].shape.heads_kv} heads]({path})"
        for mask in MASKS:
            cells = {cell.shape.seqlen: cell for cell in run.cells if cell.shape.mask == mask}
            pairs = [[cells[length].ratio("cute_flash", peer) for peer in ("fa3", "sdpa-cudnn")] for length in lengths]
            texts = [" / ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in pair) for pair in pairs]
            rows.append((f"{heads}, {mask}", *texts))
    return Table("", ("over FlashAttention-3 / cuDNN", *(f"S = {length}" for length in lengths)), tuple(rows))


def _speed(cells: list[dict[str, Any]], side: str, base: str, direction: str) -> str:
    """Geometric mean of the speed of a side over a base, and the lowest."""
    sides = [cell["sides"][direction] for cell in cells]
    ratios = [x[base]["ms"] / x[side]["ms"] for x in sides if side in x and base in x]
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})"


def mods(data: Path) -> Table:
    """User mods and block masks beside other libraries, and biases beside plain attention."""
    cells = json.loads((data / MODS).read_text(encoding="utf-8"))["cells"]
    rows = []
    for label, (kind, side, base) in MOD_ROWS.items():
        chosen = [cell for cell in cells if cell["kind"] == kind]
        rows.append((label, *(_speed(chosen, side, base, direction) for direction in ("fwd", "bwd"))))
    return Table("", ("geometric mean (lowest)", "forward", "backward"), tuple(rows))


def host(data: Path) -> Table:
    cases = json.loads((data / HOST).read_text(encoding="utf-8"))["cases"]
    rows = []
    for name, label in HOST_ROWS.items():
        sides, ratio = cases[name]["sides"], cases[name]["ratio"]
        floor = f"{sides['floor']['median_us']:.0f}"
        rows.append((label, f"{sides['cute_flash']['median_us']:.0f}", floor, "-" if ratio is None else f"{ratio:.2f}"))
    return Table("", ("host time of a warm call", "us", "launches alone, us", "over the fastest SDPA"), tuple(rows))


def start(data: Path) -> str:
    """The time of the first result of a process, in one sentence."""
    times = json.loads((data / HOST).read_text(encoding="utf-8"))["start"]
    cold, warm = (times[cache]["first_call_ms"] for cache in ("cold", "warm"))
    return (
        f"The first call of a process takes {cold / 1e3:.1f} s with an empty kernel cache and {warm / 1e3:.2f} s "
        f"with a filled one ([data]({HOST}))."
    )
