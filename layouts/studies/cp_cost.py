"""A cost model of context parallelism: bytes, computation and communication of each method. A model, not a measurement.

The time of the computation is the FLOPs of a rank divided by the measured rate of one H200; other GPUs are scaled by
their peaks. Merges, sums and copies add passes over memory. The time of the communication is the bytes of a rank
divided by a fraction of the datasheet rate of the link, plus a constant for each message. A ring communicates during
the computation, so only the part of the communication that takes longer than the computation counts. A ring receives
shards in groups (`distributed.ring`). While a group's calls run, K and V of the next group arrive and, in the backward,
dK and dV of the previous group leave. The other methods communicate before and after the computation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cute_flash.distributed.calls import BandCall
from cute_flash.distributed.choice import Shapes, sent_bytes
from cute_flash.distributed.ring import Group, Schedule, max_steps
from cute_flash.distributed.sharding import Sharding
from cute_flash.distributed.ulysses import check_divides
from cute_flash.errors import UnsupportedError
from cute_flash.planning.merge import MAX_PARTIALS
from cute_flash.spec.arch import H200, ArchSpec
from cute_flash.spec.band import Band
from cute_flash.spec.dtypes import DTYPE_BYTES
from cute_flash.spec.problem import Problem
from cute_flash.tools.roofline import visible_pairs

# Measured TFLOP/s of bf16 by head dim, forward and backward: H200, S = 16384, full mask (profiling/results/h200).
RATES = {64: (606.0, 593.0), 128: (763.0, 681.0), 256: (779.0, 505.0)}
# FLOPs of a backward relative to a forward: five matrix products instead of two.
BACKWARD_FLOPS = 2.5
# Assumed fractions of the datasheet rates: of the link for messages, of HBM for passes over memory.
LINK_SHARE, HBM_SHARE = 0.8, 0.85
# Assumed time to start a message, and to launch a merge, in ms.
MESSAGE_MS, MERGE_LAUNCH_MS = 0.01, 0.003
FP32_BYTES = 4
# GPUs of one NVLink domain, such as an HGX board: "usp" exchanges heads among them.
NODE = 8


@dataclass(frozen=True)
class Link:
    """A link between GPUs: GB/s that one GPU sends, by its datasheet."""

    name: str
    gbps: float

    def ms(self, num_bytes: float, messages: int) -> float:
        return num_bytes / (self.gbps * LINK_SHARE) / 1e6 + messages * MESSAGE_MS if num_bytes else 0.0


LINKS = {link.name: link for link in (Link("nvlink", 450.0), Link("infiniband", 50.0))}


@dataclass(frozen=True)
class Pass:
    """One pass, forward or backward, on the rank that takes longest. Times are in ms.

    Attributes:
        compute: The attention kernels.
        passes: Passes over memory that the unsharded call does not need: merges, sums, copies.
        communication: All messages.
        exposed: The part of the communication that computation does not hide.
    """

    compute: float
    passes: float
    communication: float
    exposed: float

    @property
    def total(self) -> float:
        return self.compute + self.passes + self.exposed


@dataclass(frozen=True)
class Cost:
    """The cost of one method on n ranks."""

    method: str
    ranks: int
    hops: int  # groups of shards that a ring receives, or collectives of a forward pass
    sent: int  # bytes that a rank sends, forward and backward
    forward: Pass
    backward: Pass
    single_ms: float  # forward and backward on one GPU

    @property
    def ms(self) -> float:
        return self.forward.total + self.backward.total

    @property
    def efficiency(self) -> float:
        """The speed-up over one GPU, divided by the number of ranks."""
        return self.single_ms / (self.ranks * self.ms)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ms": self.ms, "efficiency": self.efficiency}


NO_GROUP = Group((), ())


@dataclass(frozen=True)
class Model:
    """A problem on n ranks of one kind of GPU. `kind` is the sharding, "zigzag" or "contiguous"."""

    problem: Problem  # of the full sequence
    ranks: int
    link: Link
    gpu: ArchSpec = H200
    kind: str = "zigzag"

    def __post_init__(self) -> None:
        p = self.problem
        if p.seqlen_q != p.seqlen_k:
            raise UnsupportedError(
                f"{p.seqlen_q} queries and {p.seqlen_k} keys: context parallelism shards one sequence; make them equal"
            )

    @property
    def sharding(self) -> Sharding:
        return Sharding.of(self.kind, self.ranks, self.problem.seqlen_q)

    @property
    def shapes(self) -> Shapes:
        p = self.problem
        size = DTYPE_BYTES[p.dtype]
        return Shapes(p.batch, p.heads, p.heads_kv, self.sharding.shard_length, p.head_dim, p.width_v, size)

    def sent(self) -> dict[str, int]:
        """For each method, the bytes that a rank sends; `method="auto"` chooses by them."""
        return sent_bytes(self.ranks, self.shapes, self._schedule(self.ranks, self.shapes))

    def costs(self) -> list[Cost]:
        """The methods that support the problem. "usp" has Ulysses over NVLink in a node, and a ring between nodes."""
        found = [self.ring(), self.allgather()]
        for method in (self.ulysses, self.usp):
            try:
                found.append(method())
            except UnsupportedError:
                continue
        return found

    @property
    def pairs(self) -> int:
        """Visible scores of a head, in the full sequence."""
        return visible(self.problem.band, self.problem.seqlen_q, self.problem.seqlen_q)

    # ---- rates

    def compute_ms(self, pairs: float) -> tuple[float, float]:
        """The time of the forward and of the backward kernels, with `pairs` visible scores in every head."""
        p = self.problem
        rates = RATES[min(RATES, key=lambda head_dim: abs(head_dim - p.head_dim))]
        flops = 2 * p.batch * p.heads * (p.head_dim + p.width_v) * pairs
        scale = 1e9 * self.gpu.tensor_tflops / H200.tensor_tflops
        return flops / (rates[0] * scale), BACKWARD_FLOPS * flops / (rates[1] * scale)

    def memory_ms(self, num_bytes: float) -> float:
        return num_bytes / (self.gpu.hbm_tbps * HBM_SHARE * 1e9)

    @property
    def single_ms(self) -> float:
        return sum(self.compute_ms(self.pairs))

    # ---- methods

    def ring(self) -> Cost:
        return self._ring(self.ranks, self.link, self.shapes)

    def kernel_ratios(self) -> tuple[float, float]:
        """Kernel time of all ranks of a ring, divided by that of the unsharded call; forward and backward."""
        schedule = self._schedule(self.ranks, self.shapes)
        ranks = [self._ring_passes(schedule, rank, self.link, self.shapes) for rank in range(self.ranks)]
        forward, backward = (
            sum(x.compute + x.passes for x in passes) / whole
            for passes, whole in zip(zip(*ranks), self.compute_ms(self.pairs))
        )
        return forward, backward

    def allgather(self) -> Cost:
        shapes, n = self.shapes, self.ranks
        gathered = (n - 1) * shapes.kv_elements * shapes.element_bytes
        forward, backward = self.compute_ms(self.pairs / n)
        # Gathered K and V are copied into the order of positions; dK and dV likewise, and summed over ranks.
        copies = 2 * gathered
        times = self.link.ms(gathered, 2), self.link.ms(2 * gathered, 4)
        passes = self.memory_ms(copies), self.memory_ms(3 * copies)
        return self._cost("allgather", 1, 3 * gathered, (forward, backward), passes, times, times)

    def ulysses(self) -> Cost:
        check_divides(self.problem.heads, self.problem.heads_kv, self.ranks)
        sent = self._exchanged(self.ranks)
        time, copies = self.link.ms(sent, 2), self.memory_ms(4 * sent)
        compute = self.compute_ms(self.pairs / self.ranks)
        return self._cost("ulysses", 2, 2 * sent, compute, (copies, copies), (time, time), (time, time))

    def usp(self) -> Cost:
        if self.ranks <= NODE or self.ranks % NODE:
            raise UnsupportedError(f"usp on {self.ranks} ranks: use a multiple of {NODE} that is greater than {NODE}")
        check_divides(self.problem.heads, self.problem.heads_kv, NODE)
        sent = self._exchanged(NODE)
        time, copies = LINKS["nvlink"].ms(sent, 2), self.memory_ms(4 * sent)
        shapes = self.shapes
        heads_kv = max(shapes.heads_kv // NODE, 1)
        inner = Shapes(
            shapes.batch, shapes.heads // NODE, heads_kv, shapes.length * NODE, shapes.head_dim, shapes.head_dim_v,
            shapes.element_bytes,
        )  # fmt: skip
        ring = self._ring(self.ranks // NODE, self.link, inner)
        forward, backward = (
            Pass(x.compute, x.passes + copies, x.communication + time, x.exposed + time)
            for x in (ring.forward, ring.backward)
        )
        return Cost("usp", self.ranks, ring.hops, ring.sent + 2 * sent, forward, backward, self.single_ms)

    def _exchanged(self, n: int) -> int:
        """The bytes that a rank sends in one pass, forward or backward, when n ranks exchange heads."""
        shapes = self.shapes
        repeated = shapes.kv_elements * max(1, n // max(shapes.heads_kv, 1))
        return (shapes.q_out_elements + repeated) * shapes.element_bytes * (n - 1) // n

    def _schedule(self, n: int, shapes: Shapes) -> Schedule:
        sharding = Sharding.of(self.kind, n, self.problem.seqlen_q)
        return Schedule(sharding, self.problem.band, max_steps=max_steps(shapes.heads, shapes.heads_kv))

    def _ring(self, n: int, link: Link, shapes: Shapes) -> Cost:
        schedule = self._schedule(n, shapes)
        # Take the slowest of three ranks. With zigzag and a causal mask all ranks have equal work, but the last has the
        # most rows in its calls, and the first receives the most keys.
        ranks = [self._ring_passes(schedule, rank, link, shapes) for rank in sorted({0, n // 2, n - 1})]
        forward, backward = (max(passes, key=lambda x: x.total) for passes in zip(*ranks))
        sent = sent_bytes(n, shapes, schedule)["ring"]
        return Cost("ring", self.ranks, len(schedule.groups) - 1, sent, forward, backward, self.single_ms)

    def _ring_passes(self, schedule: Schedule, rank: int, link: Link, shapes: Shapes) -> tuple[Pass, Pass]:
        """The forward and the backward of one rank."""
        # K and V of the own shard are copied before they are sent.
        copied = self.memory_ms(2 * shapes.kv_elements * shapes.element_bytes)
        found = []
        for backward, all_steps in enumerate((schedule.groups, schedule.backward_groups)):
            groups = [Group((), schedule.calls(rank, rank)), *(schedule.group(rank, x) for x in all_steps[1:])]
            num_calls = sum(len(group.calls) for group in groups)
            compute = communication = exposed = 0.0
            passes = (copied if len(groups) > 1 else 0.0) + (0.0 if backward else self._merge_ms(num_calls, shapes))
            # While a group's calls run, K and V of the next group arrive, and dK and dV of the previous group leave. No
            # call hides dK and dV of the last group.
            for before, group, after in zip([NO_GROUP, *groups], [*groups, NO_GROUP], [*groups[1:], *2 * [NO_GROUP]]):
                busy = 0.0
                for call in group.calls:
                    kernels, memory = self._call(call, shapes, num_calls > 1)
                    compute, passes = compute + kernels[backward], passes + memory[backward]
                    busy += kernels[backward] + memory[backward]
                moving = link_ms(link, (after, before) if backward else (after,), shapes)
                communication += moving
                exposed += max(0.0, moving - busy)
            found.append(Pass(compute, passes, communication, exposed))
        return found[0], found[1]

    def _merge_ms(self, num_calls: int, shapes: Shapes) -> float:
        """The time of a rank's merges, apart from reading the partial outputs of calls, which `_call` counts."""
        if num_calls == 1:
            return 0.0
        # A merge before the last one writes an fp32 output, which the next one reads.
        outputs = shapes.batch * shapes.heads * shapes.head_dim_v * shapes.length
        num = -(-(num_calls - 1) // (MAX_PARTIALS - 1))
        num_bytes = shapes.element_bytes * outputs + 2 * FP32_BYTES * outputs * (num - 1)
        return self.memory_ms(num_bytes) + num * MERGE_LAUNCH_MS

    def _call(self, call: BandCall, shapes: Shapes, is_partial: bool) -> tuple[list[float], tuple[float, float]]:
        """Times of the kernels of one call, and of its passes over memory; forward and backward."""
        rows, keys = call.rows[1] - call.rows[0], call.keys[1] - call.keys[0]
        # After an exchange of heads, a rank has only some of them.
        share, size = shapes.heads / self.problem.heads, shapes.element_bytes
        compute = [share * x for x in self.compute_ms(visible(call.band, rows, keys))]
        row_elements = shapes.batch * shapes.heads * shapes.head_dim_v * rows
        key_elements = shapes.batch * shapes.heads_kv * (shapes.head_dim + shapes.head_dim_v) * keys
        # Forward: write a partial output in fp32, which a merge reads. Backward: pre- and postprocess read out and
        # dout, and clear and convert dq; dq, dk and dv are added to their sums.
        forward = self.memory_ms(2 * FP32_BYTES * row_elements) if is_partial else 0.0
        pre_and_post = (3 * size + 2 * FP32_BYTES) * row_elements
        sums = (2 * FP32_BYTES + size) * (row_elements + key_elements)
        return compute, (forward, self.memory_ms(pre_and_post + sums))

    def _cost(
        self,
        method: str,
        hops: int,
        sent: int,
        compute: tuple[float, float],
        passes: tuple[float, float],
        communication: tuple[float, float],
        exposed: tuple[float, float],
    ) -> Cost:
        forward, backward = (Pass(*x) for x in zip(compute, passes, communication, exposed))
        return Cost(method, self.ranks, hops, sent, forward, backward, self.single_ms)


def link_ms(link: Link, groups: tuple[Group, ...], shapes: Shapes) -> float:
    """The time to send K and V, or dK and dV, of some groups."""
    key_bytes = shapes.kv_elements // max(shapes.length, 1) * shapes.element_bytes
    return link.ms(key_bytes * sum(x.length for x in groups), 2 * sum(len(x.parts) for x in groups))


def visible(band: Band, rows: int, keys: int) -> int:
    """Visible scores of a head."""
    return visible_pairs(Problem(1, 1, 1, rows, keys, 64, band=band))
