"""A cost model of MLA decode: which unit of the GPU bounds a call, and for how long. A model, not a measurement.

A cache row has D = 576 numbers, of which the first 512 are also the value. For a block of 64 keys the model counts the
clocks of each unit of an SM: tensor cores, shared memory at 128 bytes a clock, and MUFU. A body of the kernel takes as
long as its busiest unit, times `OVERHEAD`. A call takes as long as its slowest part, tensor cores or HBM or L2, plus
constants for its start and its merge. profiling/notes/mla.md explains the bodies, and has the tables that
`python -m layouts.studies.mla_cost` prints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cute_flash.planning.decode import DecodePlan
from cute_flash.planning.decode_tiles import DecodeTile
from cute_flash.spec.arch import H200, KIB, SM_80, SM_89, ArchSpec
from cute_flash.spec.band import ceil_div
from cute_flash.tools.explain_decode import DecodeExplanation, DecodeShape

D, DV = 576, 512
KEYS = 64  # of a block
ROW_BYTES = 2 * D  # of a bf16 cache row
BLOCK_BYTES = KEYS * ROW_BYTES
SMEM_CLOCK = 128  # bytes of shared memory in a clock
LDMATRIX = 4  # clocks of an ldmatrix.x4
EXP2_CLOCK = 16  # exponentials of an SM in a clock
# A body is this much slower than its busiest unit, because of barriers and latencies. The Hopper forward keeps the
# tensor cores busy for 82 to 86 % of the time (fwd_sm90.md).
OVERHEAD = 1.1
# Seconds from the launch to the first products, and from the last products to the end of a call with a merge, without
# the bytes of the workspace. With them, the times of the decode kernel that HBM bounds are right within 5 %.
START, MERGE = 2.4e-6, 2.1e-6


@dataclass(frozen=True)
class Machine:
    """A GPU with the rates that a kernel can reach."""

    arch: ArchSpec
    ghz: float  # assumed clock under load
    hbm: float  # bytes per second
    l2: float
    hmma: float  # clocks of an m16n8k16 for a scheduler
    most_tflops: float  # limit of power

    def clocks(self, num_bytes: float, rate: float) -> float:
        """Clocks in which an SM gets its share of `rate` bytes per second."""
        return num_bytes * self.arch.num_sms * self.ghz * 1e9 / rate

    @property
    def keeps_in_l2(self) -> float:
        """Bytes that stay in L2 from call to call."""
        return 2 / 3 * self.arch.l2_bytes


HOPPER = Machine(H200, 1.75, 4.5e12, 5.5e12, 6.4, 700)
A100 = Machine(SM_80, 1.41, 1.8e12, 4.0e12, 8.0, 250)
L40S = Machine(SM_89, 2.3, 0.78e12, 3.0e12, 16.0, 300)


@dataclass(frozen=True)
class Body:
    """The inner loop of a kernel: clocks of an SM for a query tile of `rows` rows and a block of 64 keys."""

    name: str
    rows: int
    mma: float
    smem: float
    exposed: float = 0.0  # in which no unit works

    @property
    def mufu(self) -> float:
        return self.rows * KEYS / EXP2_CLOCK

    @property
    def clocks(self) -> float:
        return OVERHEAD * max(self.mma, self.smem, self.mufu) + self.exposed


def wgmma_clocks(columns: int, a_in_registers: bool = False) -> tuple[float, float]:
    """Clocks of the tensor cores and of shared memory for one m64nNk16 of a warpgroup."""
    a_bytes = 0 if a_in_registers else 64 * 16 * 2
    return columns / 2, (a_bytes + columns * 16 * 2) / SMEM_CLOCK


def summed(*parts: tuple[int, tuple[float, float]]) -> tuple[float, float]:
    """The clocks of instructions that are given with their numbers."""
    return sum(n * clocks[0] for n, clocks in parts), sum(n * clocks[1] for n, clocks in parts)


STORE_KV = BLOCK_BYTES / SMEM_CLOCK


def split_roles(register_tiles: int) -> Body:
    """One warpgroup computes S and P, two compute O. S takes 32 keys at a time; 64-column tiles of Q are registers."""
    in_registers = 2 * 4 * register_tiles
    scores = (2 * D // 16 - in_registers, wgmma_clocks(32)), (in_registers, wgmma_clocks(32, True))
    mma, smem = summed(*scores, (KEYS // 16 * DV // 128, wgmma_clocks(128)))
    return Body(f"wgmma, three roles, {register_tiles} tiles of Q in registers", 64, mma, smem + STORE_KV + 64)


def serial() -> Body:
    """Two warpgroups with half of the columns of O; the first one also computes S, and P between the two products."""
    mma, smem = summed((D // 16, wgmma_clocks(64)), (KEYS // 16 * DV // 256, wgmma_clocks(256)))
    return Body("wgmma, two roles, one after the other", 64, mma, smem + STORE_KV + 64, exposed=600)


def alternating() -> Body:
    """Two warpgroups with half of the columns of O compute S of every other block, and exchange P."""
    of_own, of_other = (KEYS // 16, wgmma_clocks(256, True)), (KEYS // 16, wgmma_clocks(256))
    mma, smem = summed((D // 16, wgmma_clocks(64)), of_own, of_other)
    return Body("wgmma, two equal roles", 64, mma, smem + STORE_KV + 64)


def swapped(rows: int) -> Body:
    """S^T = K Q^T and O^T = V^T P^T: query rows are the columns of wgmma."""
    mma, smem = summed((D // 16 + DV // 64 * KEYS // 16, wgmma_clocks(rows)))
    return Body(f"wgmma, swapped, {rows} rows", rows, mma, smem + STORE_KV + rows * KEYS * 2 / SMEM_CLOCK)


def mma_sync(rows: int, hmma: float, q_steps: int, block_keys: int = KEYS, row_bytes: int = ROW_BYTES) -> Body:
    """Eight warps, 16 rows each. The warps that share rows divide the keys of S, then the columns of O.

    `q_steps`: k-steps of Q that stay in registers. The others are read again for each block of `block_keys` keys.
    """
    warps, share, matrix = 8, row_bytes / ROW_BYTES, 512  # bytes of an ldmatrix.x4
    sharing = warps // (rows // 16)
    of_q = (D // 16 - q_steps) * KEYS // block_keys
    of_kv = KEYS * (D + DV) // sharing * 2 / matrix * share
    of_p = 16 * KEYS * 2 / matrix
    smem = warps * LDMATRIX * (of_q + of_kv + of_p) + STORE_KV * share + rows * KEYS * 2 / SMEM_CLOCK
    return Body(f"mma.sync, {rows} rows", rows, 2 * rows * KEYS * (D + DV) / 4096 / 4 * hmma, smem)


def fp8_wgmma() -> Body:
    """`split_roles` with an FP8 cache, which the producer warpgroup converts to 16 bits in shared memory."""
    body = split_roles(4)
    return replace(body, name="wgmma, FP8 converted by the producer", smem=body.smem + STORE_KV)


# Rows of a tile of `mma.sync`, and the k-steps of Q that fit into registers beside its output.
Q_STEPS = ((16, 36), (32, 28), (64, 0))


def bodies(machine: Machine) -> tuple[Body, ...]:
    """The bodies of a GPU's kernels for 16-bit caches, by rows."""
    few = mma_sync(16, machine.hmma, 36)
    if machine.arch.has_wgmma:
        return few, split_roles(4)
    has_wide_blocks = machine.arch.smem_per_cta > 99 * KIB
    return few, mma_sync(32, machine.hmma, 28, KEYS if has_wide_blocks else KEYS // 2)


def body_for(machine: Machine, rows: int) -> Body:
    """The smallest tile that has all rows; else the largest."""
    return next((body for body in bodies(machine) if body.rows >= rows), bodies(machine)[-1])


def head_groups(heads: int, tokens: int, tile_m: int) -> int:
    """The number of groups of query heads. A group's heads of all tokens fit into a tile of `tile_m` rows.

    One group if that would fill less than half of the rows; its rows then take several tiles.
    """
    sizes = [size for size in range(1, heads + 1) if heads % size == 0 and size * tokens <= tile_m]
    largest = max(sizes, default=0)
    return heads // largest if 2 * largest * tokens >= min(tile_m, heads * tokens) else 1


@dataclass(frozen=True)
class Rate:
    """The bound of a long call with full SMs, by the unit that takes longest."""

    tiles: int
    body: Body
    clocks: dict[str, float]
    tbps: float
    tflops: float

    @property
    def bound(self) -> str:
        return max(self.clocks, key=lambda name: self.clocks[name])


def rate(machine: Machine, heads: int, tokens: int, multicast: int = 1, body: Body | None = None) -> Rate:
    body = body or body_for(machine, heads * tokens)
    groups = head_groups(heads, tokens, body.rows)
    tiles = groups * ceil_div(heads // groups * tokens, body.rows)
    clocks = {
        "HBM": machine.clocks(BLOCK_BYTES, machine.hbm),
        "L2": machine.clocks(BLOCK_BYTES, machine.l2) * ceil_div(tiles, multicast),
        "SM": tiles * body.clocks,
    }
    flops = 2 * heads * tokens * KEYS * (D + DV)
    clocks["power"] = machine.clocks(flops, machine.most_tflops * 1e12)
    seconds = max(clocks.values()) / (machine.ghz * 1e9 * machine.arch.num_sms)
    return Rate(tiles, body, clocks, BLOCK_BYTES / seconds / 1e12, flops / seconds / 1e12)


@dataclass(frozen=True)
class Cell:
    """The predicted time of a call with one token per sequence."""

    machine: Machine
    heads: int
    batch: int
    keys: int
    body: Body
    multicast: int = 1

    @property
    def groups(self) -> int:
        return head_groups(self.heads, 1, self.body.rows)

    @property
    def division(self) -> DecodeExplanation:
        """The division of the keys, by the rule of the decode kernel."""
        tile = DecodeTile(D, self.body.rows, KEYS // 8, 8, 2)
        num_ctas = self.machine.arch.num_sms // self.groups * self.groups
        shape = DecodeShape(self.batch, self.heads, self.groups, 1, self.keys, D)
        key: Any = None
        plan = DecodePlan(key, tile, num_ctas, self.groups, self.batch * self.groups, None)
        return DecodeExplanation(shape, self.machine.arch, plan)

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.keys * ROW_BYTES

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the partial outputs, which are written and read once."""
        division = self.division
        return 0 if division.splits[1] == 1 else division.busy_ctas * self.body.rows * DV * 4

    @property
    def least_bytes(self) -> int:
        """The cache, Q and the output, each once."""
        return self.kv_bytes + self.batch * self.heads * (ROW_BYTES + 2 * DV)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of HBM, of L2 and of the SM with the most keys, each alone, and the time that power allows."""
        machine = self.machine
        q_bytes = self.division.busy_ctas * self.body.rows * ROW_BYTES
        from_l2 = self.kv_bytes * ceil_div(self.groups, self.multicast) + q_bytes
        blocks = ceil_div(self.division.keys_per_cta, KEYS)
        return {
            "HBM": 0.0 if self.kv_bytes < machine.keeps_in_l2 else self.least_bytes / machine.hbm,
            "L2": from_l2 / machine.l2,
            "SM": blocks * self.body.clocks / (machine.ghz * 1e9),
            "power": self.flops / (machine.most_tflops * 1e12),
        }

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.heads * self.keys * (D + DV)

    @property
    def bound(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def seconds(self) -> float:
        merge = MERGE + 2 * self.workspace_bytes / self.machine.l2 if self.workspace_bytes else 0.0
        return START + max(self.parts.values()) + merge


# FlashAttention-3 through q_v on an H200: microseconds by heads, for CELLS. This run has no result file; it is to be
# repeated beside the kernel.
CELLS = ((1, 8192), (8, 8192), (32, 4096), (128, 4096))
FA3 = {16: (15.3, 29.8, 45.7, 145.0), 64: (18.4, 36.1, 56.2, 150.0), 128: (19.1, 43.2, 75.4, 234.0)}


def predictions(has_multicast: bool) -> dict[int, tuple[Cell, ...]]:
    """The cells of `FA3` by heads. Multicast serves clusters of two CTAs with the same keys."""
    found = {}
    for heads in FA3:
        body, shares = body_for(HOPPER, heads), 1
        if has_multicast and heads > 64:
            body, shares = split_roles(6), 2
        found[heads] = tuple(Cell(HOPPER, heads, batch, keys, body, shares) for batch, keys in CELLS)
    return found


def mean_ratio(has_multicast: bool) -> float:
    """The geometric mean of the predicted speeds over FlashAttention-3."""
    product, cells = 1.0, 0
    for heads, row in predictions(has_multicast).items():
        for cell, us in zip(row, FA3[heads]):
            product, cells = product * us / (1e6 * cell.seconds), cells + 1
    return product ** (1 / cells)


# ---- tables
# ----------------------------------------------------------------------------------------------------------


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) + ("---:",) * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def body_table() -> str:
    hmma = HOPPER.hmma
    fp8 = (
        replace(mma_sync(rows, hmma, steps, row_bytes=D), name=f"mma.sync, {rows} rows, FP8") for rows, steps in Q_STEPS
    )
    compared = (
        *(mma_sync(rows, hmma, steps) for rows, steps in Q_STEPS),
        *(swapped(rows) for rows in (16, 32, 64)),
        serial(),
        alternating(),
        *(split_roles(tiles) for tiles in (0, 4, 6)),
        *fp8,
        fp8_wgmma(),
    )
    rows = [(body.name, *(f"{x:.0f}" for x in (body.mma, body.smem, body.mufu, body.clocks))) for body in compared]
    return table(("H200, clocks of 64 keys", "tensor cores", "shared memory", "MUFU", "block"), rows)


def rate_table(machine: Machine, head_counts: tuple[int, ...], token_counts: tuple[int, ...]) -> str:
    rows = []
    for heads in head_counts:
        texts = []
        for tokens in token_counts:
            found = rate(machine, heads, tokens)
            texts.append(f"{found.tiles} x {found.body.rows}, {found.bound}, {found.tbps:.2f}, {found.tflops:.0f}")
        rows.append((str(heads), *texts))
    return table((f"{machine.arch.gpu}, heads", *(f"T = {tokens}" for tokens in token_counts)), rows)


def cell_table(has_multicast: bool) -> str:
    rows = []
    for heads, cells in predictions(has_multicast).items():
        texts = []
        for cell, us in zip(cells, FA3[heads]):
            tbps, tflops = (x / cell.seconds / 1e12 for x in (cell.kv_bytes, cell.flops))
            ratio = us / (1e6 * cell.seconds)
            texts.append(f"{1e6 * cell.seconds:.1f}, {tbps:.2f}, {tflops:.0f}, {cell.bound}, {ratio:.2f}")
        rows.append((str(heads), *texts))
    head = "with multicast, heads" if has_multicast else "cp.async, heads"
    return table((head, *(f"B {batch}, {keys} keys" for batch, keys in CELLS)), rows)


HEADS, TOKENS = (1, 8, 16, 20, 64, 128), (1, 2, 4, 8)


def tables() -> tuple[str, ...]:
    """The tables of profiling/notes/mla.md."""
    machines = (HOPPER, A100, L40S)
    return body_table(), *(rate_table(x, HEADS, TOKENS) for x in machines), cell_table(False), cell_table(True)


def main() -> None:
    print("\n\n".join(tables()))
    print(f"\nmean speed over FlashAttention-3: {mean_ratio(False):.2f}, with multicast {mean_ratio(True):.2f}")


if __name__ == "__main__":
    main()
