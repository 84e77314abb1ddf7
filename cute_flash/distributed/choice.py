"""The choice of a method by the bytes that a rank sends."""

from __future__ import annotations

from dataclasses import dataclass

from cute_flash.distributed.comm import Axes
from cute_flash.distributed.ring import Schedule, max_steps
from cute_flash.distributed.sharding import Sharding
from cute_flash.distributed.ulysses import check_divides
from cute_flash.errors import UnsupportedError
from cute_flash.spec.band import Band

METHODS = ("ring", "allgather", "ulysses", "usp")


@dataclass(frozen=True)
class Choice:
    """A method, the reason for it, and the bytes that each possible method sends.

    Attributes:
        method: "ring", "allgather", "ulysses" or "usp".
        reason: Why "auto" chooses it; "requested" if the caller named the method.
        sent_bytes: For each possible method, the bytes that a rank sends in a forward and a backward pass; for the
            ring, the mean over ranks.

    Examples:
        >>> from cute_flash.distributed import Choice
        >>> print(Choice("ring", "requested", {"ring": 4096}))
        ring: requested
    """

    method: str
    reason: str
    sent_bytes: dict[str, int]

    def __str__(self) -> str:
        return f"{self.method}: {self.reason}"


@dataclass(frozen=True)
class Shapes:
    """Sizes of the tensors of one rank."""

    batch: int
    heads: int
    heads_kv: int
    length: int
    head_dim: int
    head_dim_v: int
    element_bytes: int

    @property
    def kv_elements(self) -> int:
        return self.batch * self.heads_kv * self.length * (self.head_dim + self.head_dim_v)

    @property
    def q_out_elements(self) -> int:
        return self.batch * self.heads * self.length * (self.head_dim + self.head_dim_v)


def check_method(method: str) -> None:
    if method not in ("auto", *METHODS):
        raise ValueError(f"method={method!r}: use one of auto, {', '.join(METHODS)}")


def choose(method: str, axes: Axes, shapes: Shapes, sharding: Sharding, band: Band) -> Choice:
    """Check the method, or choose one for "auto"."""
    check_method(method)
    n, inner = axes.size, axes.inner.size
    is_2d = axes.inner.group is not None
    if is_2d:
        if method not in ("auto", "usp"):
            raise UnsupportedError(f"method={method!r} with a 2-D DeviceMesh: use 'usp', or select one dimension of it")
        check_divides(shapes.heads, shapes.heads_kv, inner)
        return Choice("usp", "the mesh has two dimensions", {})
    if method == "usp":
        raise UnsupportedError(
            "method='usp' needs a 2-D DeviceMesh (ring, ulysses) as group, its second dimension on the faster links"
        )
    if method == "ulysses":
        check_divides(shapes.heads, shapes.heads_kv, n)
    schedule = Schedule(sharding, band, max_steps=max_steps(shapes.heads, shapes.heads_kv))
    sent = sent_bytes(n, shapes, schedule)
    if method != "auto":
        return Choice(method, "requested", sent)
    return choice_by_bytes(sent)


def choice_by_bytes(sent: dict[str, int]) -> Choice:
    """The method of "auto": the one that sends the fewest bytes.

    If `sent` has all-gather, a ring must send less than half of its bytes, because a ring also merges partial results.
    """
    ring_saves_little = "allgather" in sent and sent["ring"] > 0 and 2 * sent["ring"] >= sent["allgather"]
    best = min((name for name in sent if name != "ring" or not ring_saves_little), key=lambda name: sent[name])
    sizes = ", ".join(f"{name} {size:,}" for name, size in sent.items())
    reason = f"the fewest bytes sent by a rank in a forward and a backward pass ({sizes})"
    if best == "allgather" and sent["ring"] < sent["allgather"]:
        reason = (
            f"a ring sends more than half as many bytes, and also merges partial results (bytes sent by a rank in a "
            f"forward and a backward pass: {sizes})"
        )
    return Choice(best, reason, sent)


def sent_bytes(n: int, shapes: Shapes, schedule: Schedule) -> dict[str, int]:
    """The bytes that a rank sends in a forward and a backward pass, for each method that may be chosen.

    All-gather is left out if the gathered K and V would take more memory than the rank's own q, k, v and out.
    """
    size = shapes.element_bytes
    kv, qo = shapes.kv_elements, shapes.q_out_elements
    # K and V are sent in both passes, and dK and dV in the backward.
    per_key = kv // max(shapes.length, 1)
    sent = {"ring": 3 * size * per_key * schedule.num_sent_keys // n}
    if n * kv <= qo + kv:
        sent["allgather"] = 3 * (n - 1) * size * kv
    try:
        check_divides(shapes.heads, shapes.heads_kv, n)
    except UnsupportedError:
        return sent
    # Of each exchanged tensor, 1 / n stays on its rank.
    repeated = kv * max(1, n // max(shapes.heads_kv, 1))
    sent["ulysses"] = 2 * (qo + repeated) * size * (n - 1) // n
    return sent
