"""The postprocess kernels of the backward convert dQ to the dtype of q. Their common base."""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_flash.kernels.common.kernel import MBlockKernel


@dataclass(frozen=True)
class Params:
    """The argument of the kernel."""

    dq_accum: cute.Tensor  # (B, H, m_blocks, elements of a tile) fp32, in register order
    dq: cute.Tensor  # (B, H, Sq, D)
    dq_scale: Float32
    tiled_mma: cute.TiledMma  # its accumulator layout is the order of dq_accum
    q_tile_list: cute.Tensor | None  # of a varlen batch
    dq_progress: cute.Tensor | None = None  # (B, H, m_blocks), of Hopper kernels: claims, or semaphores


class BwdPostprocess(MBlockKernel):
    """dQ = dq_scale times the fp32 accumulators, converted from register order to rows in the dtype of q."""

    rows = "dq"
    arch: str

    @property
    def name(self) -> str:
        return f"bwd_postprocess_{self.arch}_d{self.static.head_dim}"

    def params(self, args: SimpleNamespace) -> Params:
        return Params(**vars(args), tiled_mma=self.tiled_mma())

    @cute.kernel
    def kernel(self, p: Params):
        index, head, batch = cute.arch.block_idx()
        if cutlass.const_expr(self.overlaps_previous):
            cute.arch.griddepcontrol_wait()
        self.process_cta(p, index, head, batch)
