"""`cute-flash loops`: bytes, rescales and time of FlashAttention's two loop orders on a GPU.

    Q outer     FlashAttention-2: a CTA owns a tile of Br queries; O, m and l stay on chip
    K/V outer   FlashAttention: a CTA owns a head; every K/V block of Bc keys reloads and rewrites O, m and l

`loops.tiled_q_outer` and `loops.tiled_kv_outer` run the same loops and count the same bytes.

The time is a lower bound: each unit works alone on the SMs that have a CTA, and the slowest unit decides. Two times are
computed, because the bytes of the loops pass through L2: one as if every byte came from HBM, as the papers count, and
one as if L2 served every repeated byte.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cute_flash.planning.plan import plan_forward
from cute_flash.spec import arch as archs
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.dtypes import DTYPE_BYTES
from cute_flash.spec.problem import Problem
from cute_flash.tools import roofline

# Names of the orders, as FlashAttention-2 and FlashAttention-1 run them.
Q_OUTER, KV_OUTER = "Q outer", "K/V outer"
ORDERS = {Q_OUTER: "FlashAttention-2", KV_OUTER: "FlashAttention"}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Lengths and head dims of the tables that `markdown_table` prints.
LENGTHS, HEAD_DIMS = (512, 1024, 2048, 4096, 8192), (64, 128)
# FP32 results per SM and clock; 128 for the architectures that are not listed.
FP32_PER_CLOCK = {"sm_80": 64}
# FP32 operations for each score in both orders: scale and subtract the maximum (one FMA), maximum, sum.
OPS_PER_SCORE = 3
# FP32 operations for each element of O in a step: Q outer multiplies by α; K/V outer also multiplies by l and divides
# by the new l, because it stores a normalised O.
OPS_PER_OUTPUT = {Q_OUTER: 1, KV_OUTER: 3}


def _harmonic(n: int) -> float:
    return sum(1.0 / i for i in range(1, n + 1))


@dataclass(frozen=True)
class LoopOrder:
    """One loop order of a problem: the counts of `loops.Traffic`, and the time on a GPU."""

    name: str
    problem: Problem
    arch: ArchSpec
    Br: int
    Bc: int
    read_bytes: int
    write_bytes: int
    steps: int  # pairs of a Q tile and a K/V block
    max_rescales: int  # of all rows, if the maximum of a row grows in each of its blocks
    # Of all rows, if each block is equally likely to have the largest score of a row: block j then raises the maximum
    # with probability 1 / j.
    mean_rescales: float
    num_ctas: int

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """FLOP per byte that the loop moves."""
        return roofline.flops(self.problem) / self.bytes if self.bytes else 0.0

    @property
    def busy_sms(self) -> int:
        return min(self.num_ctas, self.arch.num_sms)

    @property
    def unit_seconds(self) -> dict[str, float]:
        """The time of each unit on the busy SMs: tensor cores, exponential units, FP32 units, L2, HBM.

        "hbm" moves all bytes of the loop, "hbm once" every tensor once.
        """
        p, arch = self.problem, self.arch
        busy, clock = max(self.busy_sms, 1), arch.clock_ghz * 1e9
        scores = self.steps * self.Br * self.Bc
        outputs = self.steps * self.Br * p.width_v
        fp32_ops = OPS_PER_SCORE * scores + OPS_PER_OUTPUT[self.name] * outputs
        flops = 2 * scores * (p.head_dim + p.width_v)
        return {
            "tensor": flops / (arch.tensor_tflops * 1e12 * busy / arch.num_sms),
            "exp2": scores / (arch.exp2_per_clock * busy * clock),
            "fp32": fp32_ops / (FP32_PER_CLOCK.get(arch.name, 128) * busy * clock),
            "l2": self.bytes / (roofline.L2_BYTES_PER_CLOCK * busy * clock),
            "hbm": self.bytes / (arch.hbm_tbps * 1e12),
            "hbm once": roofline.hbm_bytes(p) / (arch.hbm_tbps * 1e12),
        }

    def seconds(self, with_l2: bool) -> float:
        return self.unit_seconds[self.bound(with_l2)]

    def bound(self, with_l2: bool) -> str:
        """The slowest unit, if L2 serves repeated bytes (`with_l2`), or if every byte comes from HBM."""
        unit_seconds = self.unit_seconds
        left_out = "hbm" if with_l2 else "hbm once"
        return max((unit for unit in unit_seconds if unit != left_out), key=unit_seconds.__getitem__)

    def as_dict(self) -> dict[str, Any]:
        """The loop order for JSON, in bytes, seconds and counts."""
        return {
            "order": self.name,
            "as_in": ORDERS[self.name],
            "tile": [self.Br, self.Bc],
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "intensity": self.intensity,
            "steps": self.steps,
            "max_rescales": self.max_rescales,
            "mean_rescales": self.mean_rescales,
            "ctas": self.num_ctas,
            "busy_sms": self.busy_sms,
            "unit_seconds": self.unit_seconds,
            "seconds_hbm": self.seconds(with_l2=False),
            "bound_hbm": self.bound(with_l2=False),
            "seconds_l2": self.seconds(with_l2=True),
            "bound_l2": self.bound(with_l2=True),
        }


def compare(problem: Problem, arch: ArchSpec, Br: int | None = None, Bc: int | None = None) -> list[LoopOrder]:
    """Both loop orders of a problem, in the order of `ORDERS`.

    Args:
        problem: Shapes, dtype and mask. Counts are sums over the batch and the query heads.
        arch: The GPU.
        Br: Rows of a Q tile. By default those of the tile that `attn` uses on this GPU, or 128 without a kernel.
        Bc: Keys of a K/V block. By default those of the same tile, or 64 without a kernel.

    Example:
        >>> q_outer, kv_outer = compare(Problem(1, 1, 1, 4096, 4096, 64), SM_80, 128, 64)
        >>> kv_outer.write_bytes // q_outer.write_bytes
        65
    """
    if Br is None or Bc is None:
        default = default_tile(problem, arch)
        Br, Bc = Br or default[0], Bc or default[1]
    p, sq, sk = problem, problem.seqlen_q, problem.seqlen_k
    element, statistic = DTYPE_BYTES[p.dtype], roofline.STATISTIC_BYTES
    key_bytes, out_bytes, query_bytes = (p.head_dim + p.width_v) * element, p.width_v * element, p.head_dim * element
    reads, writes = dict.fromkeys(ORDERS, 0), dict.fromkeys(ORDERS, 0)
    steps = max_rescales = 0
    mean_rescales = 0.0
    visited: set[int] = set()
    num_tiles = ceil_div(sq, Br)
    for i in range(num_tiles):
        rows, blocks = min(Br, sq - i * Br), p.band.blocks(i, Br, Bc, sq, sk)
        count = blocks.end - blocks.begin
        writes[Q_OUTER] += rows * (out_bytes + statistic)
        if count <= 0:
            continue
        keys = min(blocks.end * Bc, sk) - blocks.begin * Bc
        reads[Q_OUTER] += rows * query_bytes + keys * key_bytes
        reads[KV_OUTER] += count * rows * (query_bytes + out_bytes + 2 * statistic)
        writes[KV_OUTER] += count * rows * (out_bytes + 2 * statistic)
        visited.update(range(blocks.begin, blocks.end))
        steps += count
        max_rescales += rows * (count - 1)
        mean_rescales += rows * (_harmonic(count) - 1)
    reads[KV_OUTER] += sum(min(Bc, sk - j * Bc) for j in visited) * key_bytes
    heads = p.batch * p.heads
    ctas = {Q_OUTER: heads * num_tiles, KV_OUTER: heads}
    return [
        LoopOrder(
            name,
            problem,
            arch,
            Br,
            Bc,
            heads * reads[name],
            heads * writes[name],
            heads * steps,
            heads * max_rescales,
            heads * mean_rescales,
            ctas[name],
        )
        for name in ORDERS
    ]


def default_tile(problem: Problem, arch: ArchSpec) -> tuple[int, int]:
    """Br and Bc of the tile that `attn` uses; 128 x 64 if there is no kernel for the problem."""
    try:
        tile = plan_forward(problem, arch).tile
    except ValueError:
        return 128, 64
    return tile.tile_m, tile.tile_n


def _rescales(order: LoopOrder) -> str:
    rows = order.problem.batch * order.problem.heads * order.problem.seqlen_q
    return f"{order.mean_rescales / rows:.1f}, at most {order.max_rescales / rows:.0f}" if rows else "0"


def lines(orders: Sequence[LoopOrder]) -> list[str]:
    """Both orders of one problem as text, for the command line."""
    first = orders[0]
    p = first.problem
    shape = f"B {p.batch}, H {p.heads}, S {p.seqlen_q}, D {p.head_dim}, {p.dtype}, {p.band}"
    text = [f"{first.arch.gpu}, {shape}, tiles of {first.Br} queries and {first.Bc} keys"]
    for order in orders:
        units = ", ".join(f"{unit} {1e6 * seconds:.1f}" for unit, seconds in order.unit_seconds.items())
        text += [
            f"{order.name} ({ORDERS[order.name]})",
            f"  bytes     {order.read_bytes / 1e6:.2f} MB read, {order.write_bytes / 1e6:.2f} MB written, "
            f"{order.intensity:.0f} FLOP/B (ridge {order.arch.ridge:.0f})",
            f"  rescales  {_rescales(order)} of a row",
            f"  grid      {order.num_ctas} CTAs on {order.arch.num_sms} SMs",
            f"  time      {1e6 * order.seconds(False):.1f} us by {order.bound(False)} if every byte comes from HBM, "
            f"{1e6 * order.seconds(True):.1f} us by {order.bound(True)} if L2 serves repeated bytes",
            f"  units     {units} us",
        ]
    q_outer, kv_outer = orders
    text.append(
        f"K/V outer moves {kv_outer.bytes / q_outer.bytes:.1f} x the bytes and takes "
        f"{kv_outer.seconds(True) / q_outer.seconds(True):.1f} x the time (with L2)"
    )
    return text


def markdown_table(
    arch: ArchSpec,
    lengths: Iterable[int] = LENGTHS,
    head_dims: Iterable[int] = HEAD_DIMS,
    batch: int = 1,
    heads: int = 16,
    causal: bool = False,
    dtype: str = "bfloat16",
) -> str:
    """Both loop orders of several lengths and head dims as a Markdown table, one row for each shape."""
    header = (
        "N, d", "tile", "Q outer, MB", "K/V outer, MB", "ratio", "rescales of a row", "Q outer, us", "K/V outer, us",
        "CTAs",
    )  # fmt: skip
    rows = [header, ("---", *("---:" for _ in header[1:]))]
    for head_dim in head_dims:
        for length in lengths:
            problem = Problem(batch, heads, heads, length, length, head_dim, dtype, Band.of(causal, (None, None)))
            q_outer, kv_outer = compare(problem, arch)
            times = [f"{1e6 * order.seconds(True):.1f} ({order.bound(True)})" for order in (q_outer, kv_outer)]
            rows.append(
                (
                    f"{length}, {head_dim}",
                    f"{q_outer.Br} x {q_outer.Bc}",
                    f"{q_outer.bytes / 1e6:.1f}",
                    f"{kv_outer.bytes / 1e6:.1f}",
                    f"{kv_outer.bytes / q_outer.bytes:.2f}",
                    _rescales(q_outer),
                    *times,
                    f"{q_outer.num_ctas}, {kv_outer.num_ctas}",
                )
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _tile(text: str) -> tuple[int, int]:
    rows, _, keys = text.partition("x")
    if not (rows.isdecimal() and keys.isdecimal() and int(rows) and int(keys)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a tile: write BRxBC, such as 128x64")
    return int(rows), int(keys)


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: write positive numbers with commas between them")
    return tuple(map(int, parts))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `cute-flash loops`."""
    add = parser.add_argument
    add("--gpu", default="A100", metavar="NAME", help="A100, A10, L40S, H100, H200 or sm_xx (default: %(default)s)")
    add("--seqlen", type=_numbers, default=(4096,), metavar="LIST", help="queries and keys (default: 4096)")
    add("--head-dim", type=_numbers, default=(64,), metavar="LIST", help="head dims (default: 64)")
    add("--batch", type=int, default=1, metavar="B", help="sequences (default: %(default)s)")
    add("--heads", type=int, default=16, metavar="H", help="heads (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="bf16", help="dtype of q, k and v (default: %(default)s)")
    add("--causal", action="store_true", help="mask the keys after a query's own position")
    add("--tile", type=_tile, metavar="BRxBC", help="tile sizes (default: the tile of the kernel on that GPU)")
    add("--markdown", action="store_true", help="print a Markdown table with one row per shape")
    add("--json", action="store_true", help="print a JSON list with two entries per shape")


def run(args: argparse.Namespace) -> int:
    """Run `cute-flash loops` and return its exit status.

    Raises:
        ValueError: An argument is wrong.
    """
    arch = archs.by_name(args.gpu)
    if min(args.batch, args.heads) < 1:
        raise ValueError(f"batch={args.batch} and heads={args.heads} must be positive")
    if args.markdown:
        print(markdown_table(arch, args.seqlen, args.head_dim, args.batch, args.heads, args.causal, DTYPES[args.dtype]))
        return 0
    Br, Bc = args.tile or (None, None)
    band = Band.of(args.causal, (None, None))
    comparisons = [
        compare(Problem(args.batch, args.heads, args.heads, n, n, d, DTYPES[args.dtype], band), arch, Br, Bc)
        for d in args.head_dim
        for n in args.seqlen
    ]
    if args.json:
        print(json.dumps([order.as_dict() for orders in comparisons for order in orders], indent=2))
    else:
        print("\n\n".join("\n".join(lines(orders)) for orders in comparisons))
    return 0
