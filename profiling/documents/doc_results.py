"""Tables and sentences from records of single studies: fp32, decoding, training, features, mods, host time, ..."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from profiling.documents import sources
from profiling.measure.tables import Table, geometric_mean, number
from profiling.studies import decode, decode_cases, fp32, mla, training

Record = dict[str, Any]
Cell = dict[str, Any]
_NAMES = {"dropout": "dropout 0.1", "softcap": "softcap 30", "alibi": "ALiBi", "sinks": "sinks"}
_BY_HEAD_DIM = {
    **_NAMES,
    "score_mod": "score_mod",
    "bias": "bias (1, H, S, S)",
    "bias_gradient": "the same bias and its gradient",
    "varlen": "varlen, 4 x 4096",
    "deterministic": "deterministic",
}
# Table row -> kind of the cells, and the names of the timed call and of its base in the result file.
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
# Rows of the support record -> their labels in the table, in the order of the table.
SUPPORT_ROWS = {
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


def _commit(record: Record) -> str:
    return f"Commit `{sources.commit_of(record['machine'])}`"


# ---- fp32


def fp32_speed(record: Record) -> Table:
    """fp32: the speed over torch's EFFICIENT_ATTENTION, cell by cell."""
    cells, rows = record["cells"], []
    lengths = sorted({cell["shape"]["seqlen"] for cell in cells})
    for direction, label in (("fwd", "forward"), ("bwd", "backward")):
        for head_dim in sorted({cell["shape"]["head_dim"] for cell in cells}):
            of_row = partial(fp32.ratios, cells, fp32.EFFICIENT, direction=direction, head_dim=head_dim)
            pairs = [[of_row(seqlen=length, causal=causal) for causal in (False, True)] for length in lengths]
            texts = [" / ".join(f"{x[0]:.2f}" if x else "-" for x in pair) for pair in pairs]
            rows.append((f"[{label}]({sources.FP32}), D = {head_dim}", *texts, f"**{geometric_mean(of_row()):.2f}**"))
    return Table("", ("full / causal", *(f"S = {length}" for length in lengths), "mean"), tuple(rows))


def fp32_line(record: Record) -> str:
    """fp32: geometric means in two sentences."""
    texts = {}
    for direction, other in product(fp32.DIRECTIONS, (fp32.EFFICIENT, fp32.MATH)):
        ratios = fp32.ratios(record["cells"], other, direction=direction)
        texts[direction, other] = f"{geometric_mean(ratios):.2f} × ({min(ratios):.2f} or more)"
    return (
        f"Geometric means: {texts['fwd', fp32.EFFICIENT]} the speed of EFFICIENT_ATTENTION forward and "
        f"{texts['bwd', fp32.EFFICIENT]} backward; {texts['fwd', fp32.MATH]} and {texts['bwd', fp32.MATH]} that of "
        f"MATH, up to S = {fp32.MATH_LENGTH}. {_commit(record)}."
    )


def fp32_accuracy(record: Record) -> Table:
    """fp32: the worst errors against fp64, by distribution of the inputs and result."""
    rows = []
    for distribution, output in product(fp32.DISTRIBUTIONS, fp32.OUTPUTS):
        worst = [fp32.worst_errors(record, distribution, output, norm) for norm in ("max", "relative")]
        texts = [" / ".join(f"{x[peer]:.1e}" for peer in (fp32.OURS, fp32.EFFICIENT, fp32.MATH)) for x in worst]
        rows.append((f"{distribution}, {output}", *texts))
    columns = ("inputs, result", "largest element: cute_flash / EFFICIENT / MATH", "norm, relative: the same")
    return Table("", columns, tuple(rows))


def fp32_error_line(record: Record) -> str:
    """fp32: the largest ratios of our worst error to MATH's, over distributions and results."""
    texts = []
    for norm, label in (("max", "largest element"), ("relative", "norm")):
        ratios = {}
        for distribution, output in product(fp32.DISTRIBUTIONS, fp32.OUTPUTS):
            worst = fp32.worst_errors(record, distribution, output, norm)
            ratios[f"{output}; inputs: {distribution}"] = worst[fp32.OURS] / worst[fp32.MATH]
        where = max(ratios, key=lambda name: ratios[name])
        texts.append(f"{ratios[where]:.2f} for the {label} ({where})")
    return f"The worst error of cute_flash, divided by that of MATH in the same row, is at most {' and '.join(texts)}."


# ---- decoding


def decode_cells(record: Record) -> Table:
    """Decoding: time and bandwidth of cute_flash, times of the peers, and the speed over the best of them."""
    rows = []
    for cell in record["cells"]:
        calls, ratio = cell["sides"], decode.over_best(cell)
        ours = calls[decode.OURS]
        peers = [f"{calls[name]['us']:.1f}" if name in calls else "-" for name in decode.PEERS]
        over = "-" if ratio is None else f"**{ratio:.2f}**"
        lengths = f"{cell['batch']}", f"{cell['length']:,}"
        rows.append((*lengths, f"{ours['us']:.1f}", f"{ours['tbps']:.2f}", *peers, over))
    columns = ("cute_flash, µs", "TB/s", "cuDNN, µs", "FlashAttention-2, µs", "FlashAttention-3, µs")
    return Table("", ("B", "keys", *columns, "over the best peer"), tuple(rows))


def decode_line(record: Record) -> str:
    """Decoding: geometric means in one sentence."""
    few, every = decode.ratios(record, decode.SMALL_BATCH), decode.ratios(record)
    return (
        f"Geometric means of the speed over the best peer: {geometric_mean(few):.2f} × for B ≤ {decode.SMALL_BATCH}, "
        f"{geometric_mean(every):.2f} × for all cells ({min(every):.2f} or more). "
        f"{_commit(record)} ([data]({sources.DECODE}))."
    )


def decode_layers(record: Record) -> str:
    """Decoding: gaps in a CUDA graph of all layers, and host time, in two sentences."""
    gaps = [
        f"{cell['idle_us']:.1f} of {cell['span_us']:,.0f} µs at B = {cell['batch']}, {cell['length']:,} keys"
        for cell in record["layers"]
    ]
    host_us = record["host"]["us"]
    others = (
        f"SDPA with cuDNN {host_us[decode_cases.CUDNN]:.0f} µs, FlashAttention-3 {host_us[decode_cases.FA3]:.0f} µs"
    )
    return (
        f"In a CUDA graph of {record['layers'][0]['layers']} layers, each with its own cache, the GPU is idle for "
        f"{' and '.join(gaps)}. Host time of a warm call: {host_us[decode.OURS]:.0f} µs; {others}."
    )


# ---- training, mods, host time, random calls


def training_line(record: Record) -> str:
    """Training steps: the integrations over the fastest other library, in two sentences."""
    return f"{training.summary(record)} {_commit(record)} ([data]({sources.TRAINING}))."


def mods(record: Record) -> Table:
    """User mods and block masks beside other libraries, and biases beside plain attention."""
    rows = []
    for label, (kind, call, base) in MOD_ROWS.items():
        cells = [cell["sides"] for cell in record["cells"] if cell["kind"] == kind]
        texts = []
        for direction in ("fwd", "bwd"):
            calls = [cell[direction] for cell in cells]
            ratios = [x[base]["ms"] / x[call]["ms"] for x in calls if call in x and base in x]
            texts.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})")
        rows.append((label, *texts))
    return Table("", ("geometric mean (lowest)", "forward", "backward"), tuple(rows))


def host(record: Record) -> Table:
    rows = []
    for name, label in HOST_ROWS.items():
        case = record["cases"][name]
        times = [f"{case['sides'][call]['median_us']:.0f}" for call in ("cute_flash", "floor")]
        rows.append((label, *times, number(case["ratio"])))
    return Table("", ("host time of a warm call", "us", "launches alone, us", "over the fastest SDPA"), tuple(rows))


def start(record: Record) -> Table:
    """Import and first calls of a process by the place of the kernels."""
    kinds = {"cold": "nowhere: they are compiled", "warm": "the disk cache", "pack": "a pack, with an empty cache"}
    columns = ("the kernels are in", "import, ms", "first forward, ms", "first backward, ms", "imports the CuTe DSL")
    steps = ("import_ms", "first_call_ms", "first_backward_ms")
    rows = [
        (label, *(f"{times[step]:.0f}" for step in steps), "yes" if times["imports_compiler"] else "no")
        for times, label in ((record["start"][kind], label) for kind, label in kinds.items())
    ]
    return Table("", columns, tuple(rows))


def support(record: Record) -> Table:
    """The number of random calls that matched the reference, bf16 + fp16; "-": unsupported, or none was made."""
    kernels = [f"{family} {direction}" for family in ("sm90", "sm80") for direction in ("forward", "backward")]

    def cell(row: str, kernel: str) -> str:
        counts = [record["right"].get(row, {}).get(f"{kernel} {dtype}", 0) for dtype in ("bf16", "fp16")]
        return " + ".join(map(str, counts)) if any(counts) else "-"

    rows = [(label, *(cell(row, kernel) for kernel in kernels)) for row, label in SUPPORT_ROWS.items()]
    return Table("", ("calls that match fp64, bf16 + fp16", *kernels), tuple(rows))


# ---- features


def _ratio(cell: Cell, call: str) -> str:
    """Time of the base over time of the call, forward / backward."""
    calls = [cell["sides"][direction] for direction in ("fwd", "bwd")]
    return " / ".join(f"{x[cell['base']]['ms'] / x[call]['ms']:.2f}" for x in calls)


def features(record: Record) -> Table:
    settings = [(head_dim, mask) for head_dim in (64, 128) for mask in ("full", "causal")]

    def cell(kind: str, head_dim: int, mask: str) -> Cell:
        of_kind = [x for x in record["cells"] if x["kind"] == kind and x["name"].startswith(f"D={head_dim} ")]
        return next(x for x in of_kind if x["name"].endswith(mask) or kind == "window")

    def row(label: str, kind: str, call: str) -> tuple[str, ...]:
        return label, *(_ratio(cell(kind, *setting), call) for setting in settings)

    window = ["-" if mask == "full" else _ratio(cell("window", d, mask), "window 1024") for d, mask in settings]
    rows = (
        *(row(f"{label}, over plain", "feature", name) for name, label in _NAMES.items()),
        ("window of 1024 at S = 16384, over causal", *window),
        row("varlen, 4 x 4096, over dense", "equal", "varlen"),
        row("varlen, 16 lengths of 100 to 8192, over FlashAttention-3", "ragged", "varlen"),
    )
    return Table("", ("forward / backward", *(f"D = {head_dim} {mask}" for head_dim, mask in settings)), rows)


def features_by_head_dim(record: Record) -> Table:
    """The cost of features by head dim, over plain causal attention."""
    cells = [cell for cell in record["cells"] if cell["kind"] == "head-dim"]
    rows = [(label, *(_ratio(cell, name) for cell in cells)) for name, label in _BY_HEAD_DIM.items()]
    columns = (cell["name"].partition(" S=")[0].replace("=", " = ").replace(" Dv", ", Dv") for cell in cells)
    return Table("", ("forward / backward", *columns), tuple(rows))


# ---- decoding with a latent cache


def mla_cells(record: Record) -> Table:
    """MLA over contiguous caches: time, bandwidth and FLOP/s of cute_flash, and the speed over FlashAttention-3."""
    rows = []
    for cell in record["cells"]:
        if cell["part"] in (mla.CELLS, mla.TOKENS):
            ours, sm80 = cell["sides"][mla.OURS], cell["sides"][mla.SM80]
            place = (str(cell[name]) for name in ("heads", "tokens", "batch"))
            times = f"{ours['us']:.1f}", f"{ours['tbps']:.2f}", f"{ours['tflops']:.0f}", f"{sm80['us']:.1f}"
            peer = f"{cell['sides'][mla.FA3]['us']:.1f}"
            rows.append((*place, f"{cell['length']:,}", *times, peer, f"**{mla.speed_over(cell, mla.FA3):.2f}**"))
    columns = ("cute_flash, µs", "TB/s", "TFLOP/s", "by mma.sync, µs", "FlashAttention-3, µs", "over FlashAttention-3")
    return Table("", ("heads", "T", "B", "keys", *columns), tuple(rows))


def mla_caches(record: Record) -> Table:
    """MLA over pages, lists and FP8: times, and the speed over a contiguous cache in 16 bits."""
    rows = [
        (
            cell["cache"],
            *(str(cell[name]) for name in ("heads", "batch")),
            f"{cell['length']:,}",
            f"{cell['sides'][mla.OURS]['us']:.1f}",
            f"{cell['sides'][mla.OURS]['tbps']:.2f}",
            f"{mla.speed_over(cell, mla.CONTIGUOUS):.2f}",
        )
        for cell in record["cells"]
        if cell["part"] in (mla.PAGES, mla.LISTS, mla.FP8_CACHE)
    ]
    columns = ("cache", "heads", "B", "keys", "cute_flash, µs", "TB/s", "over contiguous, 16 bits")
    return Table("", columns, tuple(rows))


def mla_line(record: Record) -> str:
    """MLA: geometric means and host time in two sentences."""
    ratios: dict[int, list[float]] = {}
    for cell in record["cells"]:
        ratio = mla.speed_over(cell, mla.FA3)
        if cell["part"] == mla.CELLS and ratio is not None:
            ratios.setdefault(cell["heads"], []).append(ratio)
    means = [f"{geometric_mean(ratios[heads]):.2f} × with {heads} heads" for heads in sorted(ratios)]
    host_us = record["host"]["us"]
    return (
        f"Geometric means of the speed over FlashAttention-3, one token: {', '.join(means)}. Host time of a warm call: "
        f"{host_us[mla.OURS]:.0f} µs; FlashAttention-3 {host_us[mla.FA3]:.0f} µs. "
        f"{_commit(record)} ([data]({sources.MLA}))."
    )
