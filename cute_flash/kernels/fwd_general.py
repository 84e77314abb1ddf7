"""The forward kernels with what a call may ask for beyond plain attention: the same, with more arguments."""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from cute_flash.kernels.arguments import fake_items
from cute_flash.kernels.extras import Extras, fake_extras, softmax_scale
from cute_flash.kernels.fwd_sm80 import FwdSm80
from cute_flash.kernels.fwd_sm90 import FwdSm90


def with_extras(arguments: tuple, kernel: FwdSm80 | FwdSm90) -> tuple:
    """The fake arguments of a plain kernel, with the extras and the list of tiles before the stream."""
    *plain, stream = arguments
    features = kernel.static.features
    items = fake_items() if features.varlen else None
    return (*plain, *fake_extras(plain[0], features), items, stream)


class FwdSm80General(FwdSm80):
    def fake_arguments(self) -> tuple:
        return with_extras(super().fake_arguments(), self)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        section: Int32,
        softcap: Float32 | None,
        slopes: cute.Tensor | None,
        sinks: cute.Tensor | None,
        threshold: Int32 | None,
        keep_scale: Float32 | None,
        rng: cute.Tensor | None,
        max_logit: cute.Tensor | None,
        items: cute.Tensor | None,
        stream: CUstream,
    ):
        extras = Extras.of(scale, softcap, slopes, sinks, threshold, keep_scale, rng, max_logit)
        bounds = window_left, window_right
        scale_log2 = softmax_scale(scale, extras)
        self.launch((mQ, mK, mV, mO, mLSE), scale_log2, bounds, section, extras, items, stream)


class FwdSm90General(FwdSm90):
    def fake_arguments(self) -> tuple:
        return with_extras(super().fake_arguments(), self)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        section: Int32,
        num_blocks: Int32,
        positions: Int32,
        counter: Int64,
        softcap: Float32 | None,
        slopes: cute.Tensor | None,
        sinks: cute.Tensor | None,
        threshold: Int32 | None,
        keep_scale: Float32 | None,
        rng: cute.Tensor | None,
        max_logit: cute.Tensor | None,
        items: cute.Tensor | None,
        stream: CUstream,
    ):
        extras = Extras.of(scale, softcap, slopes, sinks, threshold, keep_scale, rng, max_logit)
        bounds = window_left, window_right
        scale_log2, grid = softmax_scale(scale, extras), (section, num_blocks, positions, counter)
        self.launch((mQ, mK, mV, mO, mLSE), scale_log2, bounds, grid, extras, items, stream)
