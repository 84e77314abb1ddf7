"""A kernel that copies one tile of one sequence by `VarlenTmaTiles`; rows past the end must not be copied."""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.smem import allocate_stages
from cute_flash.device.memory.tma import VarlenRows, VarlenTmaTiles
from cute_flash.device.scheduling.seqlen import with_batch_mode
from cute_flash.kernels.common.fakes import CUTE_DTYPES, Fakes
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.problem import Static


class RaggedCopy:
    """mX rows [begin + rows · block, begin + length) -> the same rows of mY, all heads, one warp per head.

    `mSeen` receives the full tile from shared memory, including the rows past the end.
    """

    def __init__(self, head_dim: int, rows: int = 64):
        self.static = Static("bfloat16", head_dim, varlen=True)
        self.tile = SmemTile(rows, -(-head_dim // 32) * 32)

    def fake_arguments(self) -> tuple:
        fakes = Fakes(self.static, None, {})
        fakes.sizes["columns"] = self.tile.cols
        dims = ("B", "H", "tokens", "D"), ("B", "H", "others", "D"), ("B", "H", "rows", "columns")
        tensors = (fakes.rows(self.static.dtype, x) for x in dims)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return (*tensors, Int32(0), Int32(0), Int32(0), stream)

    def compiled(self):
        options = "--gpu-arch sm_90a --enable-tvm-ffi"
        return cute.compile(self, *self.fake_arguments(), options=options)

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mY: cute.Tensor,
        mSeen: cute.Tensor,
        begin: Int32,
        length: Int32,
        block: Int32,
        stream: CUstream,
    ):
        mX, mY, mSeen = (with_batch_mode(mZ) for mZ in (mX, mY, mSeen))
        load = VarlenTmaTiles.of(cpasync.CopyBulkTensorTileG2SOp(), mX, self.tile)
        store = VarlenTmaTiles.of(cpasync.CopyBulkTensorTileS2GOp(), mY, self.tile)
        self.kernel(load, store, mSeen, begin, length, block).launch(
            grid=(mX.shape[1], 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, load: VarlenTmaTiles, store: VarlenTmaTiles, mSeen: cute.Tensor, begin: Int32, length: Int32, block: Int32
    ):
        tile, smem = self.tile, SmemAllocator()
        dtype = CUTE_DTYPES[self.static.dtype]
        sX = allocate_stages(smem, dtype, tile, 1)[None, None, 0]
        barrier = smem.allocate_array(cutlass.Int64, 1, byte_alignment=8)
        head, rows = cute.arch.block_idx()[0], VarlenRows(begin, length)
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, tile.bytes)
        load.load(sX, block, head, rows, barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        for row in cutlass.range(tile.rows, unroll=1):
            for column in cutlass.range(cute.arch.lane_idx(), tile.cols, 32, unroll=1):
                mSeen[0, head, row, column] = sX[row, column]
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.shared", space="cta")
        with cute.arch.elect_one():
            store.store(sX, block, head, rows)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
