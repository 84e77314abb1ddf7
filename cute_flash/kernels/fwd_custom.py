"""The forward kernels with a bias, functions that users write, and block maps: the general ones, with more
arguments.
"""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from cute_flash.kernels.extras import Extras, fake_written, softmax_scale, written_of
from cute_flash.kernels.fwd_general import with_extras
from cute_flash.kernels.fwd_sm80 import FwdSm80
from cute_flash.kernels.fwd_sm90 import FwdSm90


def with_written(arguments: tuple, kernel: FwdSm80 | FwdSm90) -> tuple:
    """Those of a general kernel, with what `custom_cuda.Given` names before the list of tiles."""
    *general, items, stream = with_extras(arguments, kernel)
    return (*general, *fake_written(general[0], general[1], kernel.static), items, stream)


class FwdSm80Custom(FwdSm80):
    def fake_arguments(self) -> tuple:
        return with_written(super().fake_arguments(), self)

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
        bias: cute.Tensor | None,
        tables: list | None,
        numbers: list | None,
        lists: list | None,
        items: cute.Tensor | None,
        stream: CUstream,
    ):
        written = written_of(self.static, bias, tables, numbers)
        given = softcap, slopes, sinks, threshold, keep_scale, rng, max_logit
        extras = Extras.of(scale, *given, written=written, lists=lists)
        bounds = window_left, window_right
        scale_log2 = softmax_scale(scale, extras)
        self.launch((mQ, mK, mV, mO, mLSE), scale_log2, bounds, section, extras, items, stream)


class FwdSm90Custom(FwdSm90):
    def fake_arguments(self) -> tuple:
        return with_written(super().fake_arguments(), self)

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
        bias: cute.Tensor | None,
        tables: list | None,
        numbers: list | None,
        lists: list | None,
        items: cute.Tensor | None,
        stream: CUstream,
    ):
        written = written_of(self.static, bias, tables, numbers)
        given = softcap, slopes, sinks, threshold, keep_scale, rng, max_logit
        extras = Extras.of(scale, *given, written=written, lists=lists)
        bounds = window_left, window_right
        scale_log2, grid = softmax_scale(scale, extras), (section, num_blocks, positions, counter)
        self.launch((mQ, mK, mV, mO, mLSE), scale_log2, bounds, grid, extras, items, stream)
