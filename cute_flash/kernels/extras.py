"""What the forward kernels may be asked for beyond plain attention: how it is passed, and what it is for a
head.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cute_flash.device.philox import Dropout
from cute_flash.device.score import Score
from cute_flash.problem import Features


@dataclass(frozen=True)
class Extras:
    """Of a launch. None: not asked for."""

    score: Score | None = None  # without the slopes
    slopes: cute.Tensor | None = None  # (B, H)
    sinks: cute.Tensor | None = None  # (H)
    rng: cute.Tensor | None = None  # (seed, offset)
    threshold: Int32 | None = None  # in both halves: draws below it are dropped
    keep_scale: Float32 | None = None  # 1 / (1 - dropout)
    max_logit: cute.Tensor | None = None  # (H), -inf before the launch

    @staticmethod
    def of(scale, softcap, slopes, sinks, threshold, keep_scale, rng, max_logit) -> "Extras":
        """The arguments of a launch, in their order."""
        transforms = softcap is not None or slopes is not None
        score = Score.of(scale, softcap) if transforms else None
        return Extras(score, slopes, sinks, rng, threshold, keep_scale, max_logit)

    def dropout(self) -> Dropout | None:
        if self.rng is None:
            return None
        return Dropout.read(self.rng, Uint32(self.threshold), self.keep_scale)

    def of_head(self, head: Int32, batch: Int32) -> "OfHead":
        score = self.score
        if self.slopes is not None:
            score = score.of_head(self.slopes[batch, head])
        return OfHead(score, None if self.sinks is None else self.sinks[head], self.keep_scale)


NO_EXTRAS = Extras()


@dataclass(frozen=True)
class OfHead:
    score: Score | None
    sink: Float32 | None
    keep_scale: Float32 | None


def fake_extras(mQ: cute.Tensor, features: Features) -> tuple:
    """What `Extras.of` takes after the scale."""
    # Packed tensors are (T, H, D), and the number of sequences is another one.
    batch, heads = (cute.sym_int() if features.varlen else mQ.shape[0]), mQ.shape[1]

    def floats(*shape):
        strides = tuple(cute.sym_int64() for _ in shape)
        return make_fake_tensor(Float32, shape, strides, assumed_align=4)

    def compact(dtype, size, align):
        return make_fake_compact_tensor(dtype, (size,), assumed_align=align)

    return (
        Float32(1.0) if features.softcap else None,
        floats(batch, heads) if features.alibi else None,
        floats(heads) if features.sinks else None,
        Int32(0) if features.dropout else None,
        Float32(1.0) if features.dropout else None,
        compact(Int64, 2, 8) if features.dropout else None,
        compact(Float32, heads, 4) if features.return_max_logit else None,
    )
