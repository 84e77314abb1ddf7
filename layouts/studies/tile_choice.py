"""`cute-flash tiles`: solve for Br and Bc that fit shared memory and registers, and compare with the kernel's tile.

A forward tile has Br queries and blocks of Bc keys. Four rules bound it:

    papers      (2 Br d + 2 Bc d + Br Bc) bytes + 2 Br statistics <= M    Q, O, K, V and S in shared memory
    FA1         4 Br d + 8 Bc d <= M                                      16 bits: Q and O once, K and V double-buffered
    kernel      (q Br + 2 s Bc) d bytes <= M                              Q in q stages, K and V in s stages
    registers   the accumulators of O and S leave registers for the rest of a thread

The kernels follow the last two. O and S are in registers, so the papers' rule and FA1's rule are stricter than needed.
A step reads 2 Bc d elements of K and V for 4 Br Bc d FLOP, so bytes per FLOP depend on Br alone. Bc sets the number of
steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cute_flash.planning.plan import plan_forward
from cute_flash.planning.tiles.common import ELEMENT_BYTES, copy_rows
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.spec import arch as archs
from cute_flash.spec.arch import KIB, ArchSpec
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.dtypes import DTYPE_BYTES
from cute_flash.spec.problem import Problem
from cute_flash.tools import roofline

# The architecture of a GPU that is in no table. Such a GPU has mma.sync, but no wgmma.
UNKNOWN = "sm_00"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Shared memory of each CTA that the driver reserves.
RESERVED_SMEM = KIB
# Barriers of a Hopper CTA, and the tile coordinates that its producer warp publishes to the other warps; rounded up.
BARRIER_BYTES = 512
# The most registers of a thread in a kernel without setmaxnreg.
MAX_REGISTERS = 255
# The part of a thread's registers that accumulators can take. The rest holds fragments of Q, K and V, m, l, addresses
# and temporaries. No row of the tile tables for plain attention takes more. If warps share rows, P leaves the
# registers, and accumulators can take SHARED_ROWS_SHARE.
ACCUMULATOR_SHARE = {"sm80": 0.73, "sm90": 0.83}
SHARED_ROWS_SHARE = 0.76
# Number of warpgroups with MMAs -> registers per thread, after setmaxnreg moved some from the producer to them.
SM90_REGISTERS = {1: 256, 2: 240, 3: 160}
# Rows: four or eight warps of 16 or 32 rows on mma.sync, one to three warpgroups of 64 rows on Hopper.
ROWS = {"sm80": (64, 128), "sm90": (64, 128, 192)}
KEYS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)


def family_of(arch: ArchSpec) -> str:
    return "sm90" if arch.has_wgmma else "sm80"


@dataclass(frozen=True)
class Candidate:
    """A forward tile with its resources on one GPU, and its cost for a problem."""

    arch: ArchSpec
    head_dim: int
    element_bytes: int
    Br: int
    Bc: int
    num_warps: int  # with MMAs
    stages: int  # of K, and of V; 2 is a double buffer
    q_stages: int = 1
    q_registers: int = 0  # of a thread, for fragments of Q that stay in registers
    exchange_bytes: int = 0  # of shared memory, for P and row statistics, if warps share rows

    @property
    def num_threads(self) -> int:
        """All threads of a CTA; on Hopper, these include the producer warpgroup."""
        return 32 * self.num_warps + (128 if self.arch.has_wgmma else 0)

    @property
    def smem_bytes(self) -> int:
        """The kernel's rule: Q, and the stages of K and V."""
        elements = (self.q_stages * self.Br + 2 * self.stages * self.Bc) * self.head_dim
        other_bytes = self.exchange_bytes + (BARRIER_BYTES if self.arch.has_wgmma else 0)
        return elements * self.element_bytes + other_bytes

    @property
    def papers_bytes(self) -> int:
        """The papers' rule: Q, K, V, S and O in shared memory."""
        return roofline.sram_bytes(self.Br, self.Bc, self.head_dim, self.element_bytes)

    @property
    def fa1_bytes(self) -> int:
        """FA1's rule for 16 bits, 4 Br d + 8 Bc d; twice as much for 32 bits."""
        return (4 * self.Br + 8 * self.Bc) * self.head_dim * self.element_bytes // 2

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread for O and S in fp32; on Hopper also for P in 16 bits, beside the next S."""
        elements = self.Br * (self.head_dim + self.Bc) + (self.Br * self.Bc // 2 if self.arch.has_wgmma else 0)
        return ceil_div(elements, 32 * self.num_warps) + self.q_registers

    @property
    def max_registers(self) -> int:
        """Registers that a thread with MMAs can have."""
        return SM90_REGISTERS[self.num_warps // 4] if self.arch.has_wgmma else MAX_REGISTERS

    @property
    def max_accumulator_registers(self) -> int:
        share = SHARED_ROWS_SHARE if self.exchange_bytes else ACCUMULATOR_SHARE[family_of(self.arch)]
        return int(share * self.max_registers)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that run on an SM at once, by shared memory, registers and threads."""
        arch = self.arch
        by_smem = arch.smem_per_sm // (self.smem_bytes + RESERVED_SMEM)
        if arch.has_wgmma:
            # Registers are split unevenly between warpgroups, and a CTA takes them all.
            return min(1, by_smem)
        return min(
            by_smem,
            arch.registers_per_sm // (self.num_threads * (MAX_REGISTERS + 1)),
            arch.max_threads_per_sm // self.num_threads,
        )

    @property
    def warps_per_sm(self) -> int:
        """Warps with MMAs on an SM."""
        return self.ctas_per_sm * self.num_warps

    @property
    def tile_intensity(self) -> float:
        """FLOP per byte of K and V that a tile reads: 2 Br / element_bytes."""
        return 2 * self.Br / self.element_bytes

    def complaints(self) -> list[str]:
        """The rules that the tile breaks."""
        broken = []
        if self.smem_bytes > self.arch.smem_per_cta:
            broken.append(f"{self.smem_bytes / KIB:.0f} KB of shared memory, {self.arch.smem_per_cta / KIB:.0f} exist")
        limit = self.max_accumulator_registers
        if self.accumulator_registers > limit:
            broken.append(f"accumulators take {self.accumulator_registers} registers of a thread, {limit} are free")
        if not self.arch.has_wgmma and self.Bc % copy_rows(self.head_dim, self.num_threads):
            rows = copy_rows(self.head_dim, self.num_threads)
            broken.append(f"{self.Bc} keys: not a multiple of {rows}, the rows that all threads copy at once")
        return broken

    @property
    def fits(self) -> bool:
        return not self.complaints()

    def bytes(self, problem: Problem) -> int:
        """Bytes of a forward if every Q tile reads K and V from memory."""
        return roofline.fa_bytes(problem, self.Br)

    def intensity(self, problem: Problem) -> float:
        return roofline.flops(problem) / self.bytes(problem)

    @property
    def text(self) -> str:
        stages = f"{self.stages} K/V stage{'s' if self.stages > 1 else ''}"
        return f"{self.Br}x{self.Bc}, {self.num_warps} warps, {stages}"

    @staticmethod
    def of_row(row: FwdTileSm80 | FwdTileSm90, arch: ArchSpec, element_bytes: int) -> Candidate:
        """A row of the tile tables as a candidate."""
        sizes = (arch, row.head_dim, element_bytes, row.tile_m, row.tile_n)
        if isinstance(row, FwdTileSm90):
            return Candidate(*sizes, 4 * row.num_warpgroups, row.stages, row.q_stages)
        q_registers = row.tile_m // row.warps_m * row.q_steps // 4
        return Candidate(*sizes, row.num_warps, row.stages, q_registers=q_registers, exchange_bytes=row.exchange_bytes)


def warp_counts(arch: ArchSpec, rows: int) -> list[int]:
    """Numbers of warps with MMAs for a tile's rows: 16 or 32 rows per warp, on Hopper 64 rows per warpgroup."""
    if arch.has_wgmma:
        return [rows // 16]
    return [num_warps for num_warps in (4, 8) if rows // num_warps in (16, 32)]


def largest_keys(arch: ArchSpec, head_dim: int, element_bytes: int, rows: int) -> dict[str, int]:
    """Solve each rule for the most keys of a block, for a tile of `rows` queries; 0 if not even one fits.

    Args:
        arch: The GPU; M is its shared memory for a CTA.
        head_dim: d.
        element_bytes: 2 or 4.
        rows: Br.

    Returns:
        The most keys by "papers", "FA1", "kernel" with one and two K/V stages, and "registers" with the most warps.
    """
    M, d, b = arch.smem_per_cta, head_dim, element_bytes
    num_warps = max(warp_counts(arch, rows))
    one = Candidate(arch, d, b, rows, 0, num_warps, 1)
    M_kernel = M - (BARRIER_BYTES if arch.has_wgmma else 0)
    # On Hopper, P takes half as many registers as S.
    per_key = rows * (1.5 if arch.has_wgmma else 1.0) / (32 * num_warps)
    keys = {
        "papers": ((M - 2 * rows * roofline.STATISTIC_BYTES) / b - 2 * rows * d) / (2 * d + rows),
        "FA1": (M - 2 * b * rows * d) / (4 * b * d),
        "kernel, 1 stage": (M_kernel / b - rows * d) / (2 * d),
        "kernel, 2 stages": (M_kernel / b - rows * d) / (4 * d),
        "registers": (one.max_accumulator_registers - rows * d / (32 * num_warps)) / per_key,
    }
    return {rule: max(0, int(value)) for rule, value in keys.items()}


def candidates(arch: ArchSpec, head_dim: int, element_bytes: int) -> list[Candidate]:
    """All tiles that fit the GPU, the best first.

    The criteria are those of the tile tables, in this order: two CTAs on an SM (Hopper: two or three warpgroups, which
    alternate), to hide latency; at least 32 keys; many rows, because bytes fall with Br; 32 rows per warp on mma.sync,
    which read less shared memory per MMA; a double buffer; many keys, because each step has a fixed cost.
    """
    width = ceil_div(head_dim, 32) * 32
    found = [
        Candidate(arch, width, element_bytes, rows, keys, num_warps, stages, q_stages)
        for rows in ROWS[family_of(arch)]
        for keys in KEYS
        for num_warps in warp_counts(arch, rows)
        # Two stages of Q on Hopper: the next tile starts while this one ends.
        for stages, q_stages in (((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)) if arch.has_wgmma else ((1, 1), (2, 1)))
    ]
    return sorted((one for one in found if one.fits), key=_rank, reverse=True)


def _rank(one: Candidate) -> tuple[int, ...]:
    rows_per_warp = one.Br // one.num_warps
    keys, stages = min(one.Bc, 32), min(one.stages, 2)
    return (min(one.warps_per_sm, 8), keys, one.Br, rows_per_warp, stages, one.Bc, one.q_stages, one.stages)


def best(arch: ArchSpec, head_dim: int, element_bytes: int) -> Candidate:
    """The tile that the rules choose for a GPU, whether or not the tables have a row for it.

    Raises:
        ValueError: No tile fits.
    """
    found = candidates(arch, head_dim, element_bytes)
    if not found:
        raise ValueError(f"head_dim={head_dim}: no tile fits {arch.smem_per_cta / KIB:.0f} KB of shared memory")
    return found[0]


def as_row(one: Candidate) -> str:
    """The candidate as a row of a tile table, in Python; fp32 has none, because its tiles hold fp16 pieces."""
    if one.element_bytes != ELEMENT_BYTES:
        return "no table row of this form: fp32 kernels hold two fp16 pieces of each element"
    if one.arch.has_wgmma:
        return f"FwdTileSm90({one.head_dim}, {one.Br}, {one.Bc}, {one.stages}, {one.q_stages})"
    return f"FwdTileSm80({one.head_dim}, {one.Br}, {one.Bc}, {one.num_warps}, {one.stages})"


def reasons(row: FwdTileSm80 | FwdTileSm90, ours: Candidate, chosen: Candidate) -> list[str]:
    """Why the row of the table differs from the tile that the rules choose; empty if it does not."""
    text = []
    if (ours.Br, ours.num_warps) != (chosen.Br, chosen.num_warps):
        text.append(f"{ours.Br} rows in {ours.num_warps} warps, not {chosen.Br} in {chosen.num_warps}")
        taller = replace(ours, Br=chosen.Br, num_warps=chosen.num_warps, q_registers=0, q_stages=chosen.q_stages)
        text += [f"{chosen.Br} rows and {ours.Bc} keys do not fit: {complaint}" for complaint in taller.complaints()]
    if ours.Bc != chosen.Bc:
        text.append(f"{ours.Bc} keys, not {chosen.Bc}")
        wider = replace(ours, Bc=chosen.Bc)
        text += [f"{ours.Br} rows and {chosen.Bc} keys do not fit: {complaint}" for complaint in wider.complaints()]
    if ours.q_registers:
        text.append(f"Q stays in {ours.q_registers} registers of a thread, which saves its reads from shared memory")
    if ours.stages != chosen.stages:
        text.append(f"{ours.stages} K/V stage(s), not {chosen.stages}")
    if ours.stages == 1 and chosen.stages > 1:
        text.append("with one stage the copy of K overlaps P V, and the copy of V overlaps Q Kᵀ")
    if ours.ctas_per_sm != chosen.ctas_per_sm:
        text.append(f"{ours.ctas_per_sm} CTA(s) on an SM, not {chosen.ctas_per_sm}")
    if text:
        text.append(f"evidence of the row: {row.measured}")
    return text


@dataclass(frozen=True)
class Choice:
    """The candidates of a problem on a GPU, and the row of the tile table if there is one."""

    problem: Problem
    candidates: tuple[Candidate, ...]  # that fit, the best first
    row: FwdTileSm80 | FwdTileSm90 | None
    no_row: str = ""  # why there is no row

    @staticmethod
    def of(problem: Problem, arch: ArchSpec) -> Choice:
        """Choose tiles for a problem; `arch` can be a GPU that the tables do not have."""
        # Raises if no tile fits.
        best(arch, problem.head_dim, DTYPE_BYTES[problem.dtype])
        found = tuple(candidates(arch, problem.head_dim, DTYPE_BYTES[problem.dtype]))
        if arch.name not in archs.ARCHS:
            return Choice(problem, found, None, f"the tables have no rows for {arch.gpu}")
        try:
            row = plan_forward(problem, arch).tile
        except ValueError as error:
            return Choice(problem, found, None, str(error))
        if not isinstance(row, FwdTileSm80 | FwdTileSm90):
            return Choice(problem, found, None, f"{problem.dtype} has a kernel of another kind, with the tile {row}")
        return Choice(problem, found, row)

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]

    @property
    def table_candidate(self) -> Candidate | None:
        arch = self.chosen.arch
        return None if self.row is None else Candidate.of_row(self.row, arch, DTYPE_BYTES[self.problem.dtype])

    @property
    def why(self) -> list[str]:
        ours = self.table_candidate
        return [] if ours is None or self.row is None else reasons(self.row, ours, self.chosen)

    def shortlist(self, count: int) -> list[Candidate]:
        """The first `count` candidates with different (Br, Bc, warps), each with its best number of stages."""
        seen: dict[tuple[int, int, int], Candidate] = {}
        for one in self.candidates:
            seen.setdefault((one.Br, one.Bc, one.num_warps), one)
        return list(seen.values())[:count]

    def lines(self, count: int = 8) -> list[str]:
        """The choice as text: limits, a table of candidates, the table's row, the reasons."""
        p, arch = self.problem, self.chosen.arch
        header = ("tile", "smem", "FA1", "papers", "accum. regs", "CTAs/SM", "MB", "FLOP/B", "steps")
        rows = [header, *(self._cells(one) for one in self.shortlist(count))]
        ours = self.table_candidate
        text = [
            f"{arch.gpu}: {arch.smem_per_cta / KIB:.0f} KB of shared memory for a CTA, "
            f"{arch.smem_per_sm / KIB:.0f} KB and {arch.registers_per_sm} registers for an SM",
            f"D {p.head_dim}, {p.dtype}, {p.band}; MB, FLOP/B and steps for B {p.batch}, H {p.heads}, S {p.seqlen_q}; "
            "KB in (brackets) break that rule",
        ]
        for tile_rows in ROWS[family_of(arch)]:
            keys = largest_keys(arch, self.chosen.head_dim, self.chosen.element_bytes, tile_rows)
            most = ", ".join(f"{number} ({rule})" for rule, number in keys.items())
            text.append(f"most keys for {tile_rows} rows: {most}")
        if ours is not None:
            rows.append(self._cells(ours))
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        table = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        text += table[:-1] if ours is not None else table
        text.append(f"by the rules  {self.chosen.text}: {as_row(self.chosen)}")
        if ours is None:
            text.append(f"table         no row: {self.no_row}")
        else:
            text += [f"table         {self.row}", table[-1]]
            text += [f"differs       {why}" for why in self.why] or ["differs       no"]
        return text

    def _cells(self, one: Candidate) -> tuple[str, ...]:
        limit = one.arch.smem_per_cta

        def kb(size: int) -> str:
            text = f"{size / KIB:.0f} KB"
            return text if size <= limit else f"({text})"

        steps = ceil_div(self.problem.seqlen_k, one.Bc)
        sizes = (kb(one.smem_bytes), kb(one.fa1_bytes), kb(one.papers_bytes), str(one.accumulator_registers))
        cost = (f"{one.bytes(self.problem) / 1e6:.0f}", f"{one.intensity(self.problem):.0f}", str(steps))
        return (one.text, *sizes, str(one.ctas_per_sm), *cost)

    def as_dict(self) -> dict[str, Any]:
        """The choice for JSON."""
        ours = self.table_candidate
        return {
            "problem": asdict(self.problem),
            "gpu": self.chosen.arch.gpu,
            "smem_per_cta": self.chosen.arch.smem_per_cta,
            "candidates": [self._as_dict(one) for one in self.candidates],
            "row": ours and {**self._as_dict(ours), "measured": self.row and self.row.measured},
            "no_row": self.no_row,
            "differs": self.why,
        }

    def _as_dict(self, one: Candidate) -> dict[str, Any]:
        names = (
            "Br", "Bc", "num_warps", "stages", "q_stages", "smem_bytes", "papers_bytes", "fa1_bytes",
            "accumulator_registers", "ctas_per_sm", "warps_per_sm",
        )  # fmt: skip
        values = {name: getattr(one, name) for name in names}
        cost = {"bytes": one.bytes(self.problem), "intensity": one.intensity(self.problem)}
        return {**values, **cost, "row": as_row(one)}


def markdown_table(gpus: Sequence[str] = ("A100", "A10", "H100"), head_dims: Sequence[int] = (64, 128, 256)) -> str:
    """For several GPUs: the most keys by each rule, the tile that the rules choose, and the row of the tile table.

    The most keys are for tiles with as many queries as the chosen tile, in bf16 without a mask. The result is Markdown.
    """
    header = ("GPU, D", "papers", "FA1", "kernel, 2 stages", "registers", "by the rules", "table", "CTAs on an SM")
    rows = [header, ("---", *("---:" for _ in header[1:]))]
    for gpu in gpus:
        for head_dim in head_dims:
            choice = Choice.of(Problem(1, 16, 16, 4096, 4096, head_dim, "bfloat16"), archs.by_name(gpu))
            one, ours = choice.chosen, choice.table_candidate
            keys = largest_keys(one.arch, one.head_dim, one.element_bytes, one.Br)
            most = (str(keys[rule]) for rule in header[1:5])
            table = "-" if ours is None else ours.text
            rows.append((f"{gpu}, {head_dim}", *most, one.text, table, str((ours or one).ctas_per_sm)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `cute-flash tiles`."""
    add = parser.add_argument
    add(
        "--gpu",
        default="A100",
        metavar="NAME",
        help=f"{', '.join(archs.GPUS)}, sm_xx, or with --smem-kb any name (default: %(default)s)",
    )
    add("--head-dim", type=int, default=128, metavar="D", help="head dim (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="bf16", help="dtype of q, k and v (default: %(default)s)")
    add("--causal", action="store_true", help="mask the keys after a query's own position")
    add("--seqlen", type=int, default=4096, metavar="S", help="queries and keys (default: %(default)s)")
    add("--batch", type=int, default=1, metavar="B", help="sequences (default: %(default)s)")
    add("--heads", type=int, default=16, metavar="H", help="heads (default: %(default)s)")
    add("--count", type=int, default=8, metavar="N", help="candidates to show (default: %(default)s)")
    add("--smem-kb", type=int, metavar="KB", help="a GPU that is not in the tables: shared memory of a CTA")
    add("--smem-sm-kb", type=int, metavar="KB", help="shared memory of an SM (default: --smem-kb + 1)")
    add("--sms", type=int, metavar="N", help="number of SMs (default: those of --gpu)")
    add("--registers", type=int, metavar="N", help="registers of an SM (default: those of --gpu)")
    add("--threads", type=int, metavar="N", help="threads of an SM (default: those of --gpu)")
    add("--json", action="store_true", help="print JSON")


def arch_of(args: argparse.Namespace) -> ArchSpec:
    """The GPU of the arguments: one of the tables, or one that is described by --smem-kb.

    A described GPU has the instructions and rates of --gpu, or of an A100 if that name is unknown. The rates do not
    change the choice.

    Raises:
        ValueError: --smem-kb is missing, or it contradicts another size.
    """
    sizes = {"smem_sm_kb": args.smem_sm_kb, "sms": args.sms, "registers": args.registers, "threads": args.threads}
    if args.smem_kb is None:
        if given := [f"--{name.replace('_', '-')}" for name, value in sizes.items() if value is not None]:
            raise ValueError(f"{', '.join(given)}: describe a GPU with --smem-kb too")
        return archs.by_name(args.gpu)
    smem_sm_kb = args.smem_kb + 1 if args.smem_sm_kb is None else args.smem_sm_kb
    if min([args.smem_kb, *(x for x in sizes.values() if x is not None)]) <= 0 or smem_sm_kb < args.smem_kb:
        raise ValueError(f"--smem-kb {args.smem_kb}: sizes must be positive, and an SM has at least a CTA's memory")
    try:
        base = archs.by_name(args.gpu)
    except ValueError:
        base = replace(archs.SM_80, name=UNKNOWN)
    return replace(
        base,
        gpu=f"{args.gpu}, as described",
        smem_per_cta=args.smem_kb * KIB,
        smem_per_sm=smem_sm_kb * KIB,
        num_sms=args.sms or base.num_sms,
        registers_per_sm=args.registers or base.registers_per_sm,
        max_threads_per_sm=args.threads or base.max_threads_per_sm,
    )


def run(args: argparse.Namespace) -> int:
    """Run `cute-flash tiles` and return its exit status.

    Raises:
        ValueError: An argument is wrong, or no tile fits.
    """
    sizes = (args.batch, args.heads, args.heads, args.seqlen, args.seqlen, args.head_dim)
    if min(*sizes, args.count) < 1:
        raise ValueError("batch, heads, seqlen, head_dim and count must be positive")
    problem = Problem(*sizes, DTYPES[args.dtype], Band.of(args.causal, (None, None)))
    choice = Choice.of(problem, arch_of(args))
    print(json.dumps(choice.as_dict(), indent=2) if args.json else "\n".join(choice.lines(args.count)))
    return 0
