"""A model of one SM in a forward: when copies, tensor cores and softmax work, in clocks.

Four schedules are simulated: one K/V buffer, two stages by cp.async with one and with two CTAs (Ampere), and TMA with
two MMA warpgroups in ping-pong (Hopper). Durations follow from the peak rates in `spec.arch` and `tools.roofline`.
Latencies, barriers and instruction issue take no time, so the model shows the order of events, not real times.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from cute_flash.spec.arch import SM_80, SM_90, ArchSpec
from cute_flash.tools.roofline import L2_BYTES_PER_CLOCK
from layouts.studies.loop_order import FP32_PER_CLOCK, OPS_PER_SCORE

ELEMENT_BYTES = 2
# Rows of a timeline that all warps share.
COPY, TENSOR = "copies", "tensor cores"


@dataclass(frozen=True)
class Event:
    """A piece of work: `kind` is K, V, QK, PV or softmax; `owner` is the CTA or warpgroup that it belongs to."""

    row: str
    kind: str
    block: int
    start: float
    end: float
    owner: int = 0


@dataclass(frozen=True)
class Clocks:
    """The clocks of one K/V block for `rows` queries on one SM."""

    arch: ArchSpec
    rows: int
    keys: int
    head_dim: int

    @property
    def product(self) -> float:
        """Q Kᵀ, or P V."""
        flops_per_clock = self.arch.tensor_tflops * 1e3 / (self.arch.num_sms * self.arch.clock_ghz)
        return 2 * self.rows * self.keys * self.head_dim / flops_per_clock

    @property
    def softmax(self) -> float:
        """One exponential and `OPS_PER_SCORE` fp32 operations for each score."""
        per_clock = FP32_PER_CLOCK.get(self.arch.name, 128)
        return self.rows * self.keys * (1 / self.arch.exp2_per_clock + OPS_PER_SCORE / per_clock)

    @property
    def copy(self) -> float:
        """K, or V, from L2."""
        return self.keys * self.head_dim * ELEMENT_BYTES / L2_BYTES_PER_CLOCK


@dataclass
class Timeline:
    """Events in order, and the time at which each row of the timeline is free."""

    title: str
    events: list[Event] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def run(self, row: str, kind: str, block: int, ready: float, clocks: float, owner: int = 0) -> float:
        """Add work to a row at the time when its inputs are ready and the row is free; return the end time."""
        start = max(ready, self.free[row])
        self.free[row] = start + clocks
        self.events.append(Event(row, kind, block, start, start + clocks, owner))
        return start + clocks

    def tensor_busy(self, begin: float, end: float) -> float:
        """The part of the time from `begin` to `end` in which the tensor cores work."""
        spans = [(max(e.start, begin), min(e.end, end)) for e in self.events if e.row == TENSOR]
        return sum(stop - start for start, stop in spans if stop > start) / (end - begin)


def one_buffer(clocks: Clocks, num_blocks: int) -> Timeline:
    """One CTA with one buffer: the next block is loaded when the current one is done."""
    time, line = 0.0, Timeline("Ampere with one buffer, 1 CTA on the SM")
    for j in range(num_blocks):
        for operand in "KV":
            time = line.run(COPY, operand, j, time, clocks.copy)
        time = line.run(TENSOR, "QK", j, time, clocks.product)
        time = line.run("softmax, CTA 1", "softmax", j, time, clocks.softmax)
        time = line.run(TENSOR, "PV", j, time, clocks.product)
    return line


def two_stages(clocks: Clocks, num_blocks: int, num_ctas: int) -> Timeline:
    """CTAs with two stages: K and V of block j + 1 are requested after Q Kᵀ of block j (`kernels/sm80/fwd.py`)."""
    line = Timeline(f"Ampere: two stages by cp.async, {num_ctas} CTA{'s' if num_ctas > 1 else ''} on the SM")

    def load(j: int, cta: int, ready: float) -> float:
        for operand in "KV":
            ready = line.run(COPY, operand, j, ready, clocks.copy, cta)
        return ready

    landed = [load(0, cta, 0.0) for cta in range(num_ctas)]
    done, probs = [0.0] * num_ctas, [0.0] * num_ctas  # when P V and P of the last block were ready
    for j in range(num_blocks):
        for cta in range(num_ctas):
            scores = line.run(TENSOR, "QK", j, max(landed[cta], done[cta]), clocks.product, cta)
            if j + 1 < num_blocks:
                landed[cta] = load(j + 1, cta, scores)
            probs[cta] = line.run(f"softmax, CTA {cta + 1}", "softmax", j, scores, clocks.softmax, cta)
        for cta in range(num_ctas):
            done[cta] = line.run(TENSOR, "PV", j, probs[cta], clocks.product, cta)
    return line


def ping_pong(clocks: Clocks, num_blocks: int, num_warpgroups: int = 2, stages: int = 2) -> Timeline:
    """A TMA producer and MMA warpgroups that alternate in issuing Q Kᵀ of a block and P V of the block before it.

    `clocks` are those of the rows of one warpgroup.
    """
    line = Timeline(f"Hopper: TMA producer, {num_warpgroups} MMA warpgroups in ping-pong")
    ready = [0.0] * num_warpgroups  # P of the last block
    read: dict[tuple[str, int], float] = {}  # (operand, block) -> when all warpgroups have multiplied with it
    landed: dict[tuple[str, int], float] = {}

    def load(operand: str, block: int) -> None:
        if block < num_blocks:
            empty = read.get((operand, block - stages), 0.0)
            landed[operand, block] = line.run(COPY, operand, block, empty, clocks.copy)

    load("K", 0)
    for j in range(num_blocks + 1):
        load("K", j + 1)
        load("V", j)
        for w in range(num_warpgroups):
            scores = 0.0
            if j < num_blocks:
                scores = line.run(TENSOR, "QK", j, max(ready[w], landed["K", j]), clocks.product, w)
                read["K", j] = scores
            if j > 0:
                landed_v = max(ready[w], landed["V", j - 1])
                read["V", j - 1] = line.run(TENSOR, "PV", j - 1, landed_v, clocks.product, w)
            if j < num_blocks:
                ready[w] = line.run(f"softmax, warpgroup {w + 1}", "softmax", j, scores, clocks.softmax, w)
    return line


def schedules(num_blocks: int) -> list[Timeline]:
    """All schedules with the tiles of the tables for head dim 128: 128 x 48 on an A100, 128 x 128 on an H100."""
    ampere, hopper = Clocks(SM_80, 128, 48, 128), Clocks(SM_90, 64, 128, 128)
    return [
        one_buffer(ampere, num_blocks),
        two_stages(ampere, num_blocks, 1),
        two_stages(ampere, num_blocks, 2),
        ping_pong(hopper, num_blocks),
    ]
