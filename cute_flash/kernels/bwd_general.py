"""The backward kernels with softcap, ALiBi and dropout: the same, with more arguments.

A sink is in the LSE, and its own gradient a sum over rows: no kernel needs to know of it.
"""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor

from cute_flash.device.score import Score
from cute_flash.device.score_bwd import Terms
from cute_flash.kernels.arguments import fake_items
from cute_flash.kernels.bwd_sm80 import BwdSm80
from cute_flash.kernels.bwd_sm90 import BwdSm90
from cute_flash.kernels.extras import fake_extras
from cute_flash.spec.problem import Static


def with_terms(arguments: tuple, kernel: BwdSm80 | BwdSm90) -> tuple:
    """The fake arguments of a plain kernel, with more before the stream: softcap, slopes and the parts of
    their gradients, threshold, 1 / (1 - dropout), (seed, offset), and the list of tiles of a packed batch.
    """
    *plain, stream = arguments
    softcap, slopes, _sinks, *dropout, _max_logit = fake_extras(plain[0], kernel.static.features)
    dslopes = None
    if slopes is not None:
        batch, heads = slopes.shape
        shape = (cute.sym_int() if kernel.static.features.varlen else batch, heads, cute.sym_int())
        dslopes = make_fake_compact_tensor(Float32, shape, stride_order=(2, 1, 0), assumed_align=4)
    items = fake_items() if kernel.static.features.varlen else None
    return (*plain, softcap, slopes, dslopes, *dropout, items, stream)


class WithTerms:
    """Of a kernel that has them."""

    static: Static

    def terms(self, mQ: cute.Tensor, scale: Float32, softcap, *others) -> Terms | None:
        """None for a packed batch of plain attention."""
        features = self.static.features
        if not (features.softcap or features.alibi or features.dropout):
            return None
        return Terms(Score.of(scale, softcap, gives_tangent=True), mQ.shape[1], *others)


class BwdSm80General(WithTerms, BwdSm80):
    def fake_arguments(self) -> tuple:
        return with_terms(super().fake_arguments(), self)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mD: cute.Tensor,
        mdQ: cute.Tensor,
        mCounters: cute.Tensor | None,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        section: Int32,
        softcap: Float32 | None,
        slopes: cute.Tensor | None,
        dslopes: cute.Tensor | None,
        threshold: Int32 | None,
        keep_scale: Float32 | None,
        rng: cute.Tensor | None,
        items: cute.Tensor | None,
        stream: CUstream,
    ):
        tensors, bounds = (mQ, mK, mV, mdO, mLSE, mD, mdQ, mCounters, mdK, mdV), (window_left, window_right)
        terms = self.terms(mQ, scale, softcap, slopes, dslopes, threshold, keep_scale, rng)
        self.launch(tensors, scale, bounds, section, terms, items, stream)


class BwdSm90General(WithTerms, BwdSm90):
    def fake_arguments(self) -> tuple:
        return with_terms(super().fake_arguments(), self)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mD: cute.Tensor,
        mdQ: cute.Tensor,
        mCounters: cute.Tensor | None,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        section: Int32,
        num_blocks: Int32,
        counter: Int64,
        softcap: Float32 | None,
        slopes: cute.Tensor | None,
        dslopes: cute.Tensor | None,
        threshold: Int32 | None,
        keep_scale: Float32 | None,
        rng: cute.Tensor | None,
        items: cute.Tensor | None,
        stream: CUstream,
    ):
        tensors = mQ, mK, mV, mdO, mLSE, mD, mdQ, mCounters, mdK, mdV
        bounds, grid = (window_left, window_right), (section, num_blocks, counter)
        terms = self.terms(mQ, scale, softcap, slopes, dslopes, threshold, keep_scale, rng)
        self.launch(tensors, scale, bounds, grid, terms, items, stream)


class BwdSm90OrderedGeneral(BwdSm90General):
    """Tiles of keys add to a block of dQ in turn."""

    is_ordered = True
