"""FP8 (e4m3) operands in shared memory as fp16 fragments of mma.sync, and rounding to FP8.

ldmatrix moves 16-bit elements, so it does not give threads the FP8 elements of their fragments. Instead of exchanging
elements between threads, the kernel permutes columns:

K. A thread reads 16 consecutive bytes of a key, and uses four of them in each of four k-steps. The product sums over
columns, so their order does not matter if Q has the same order (`query_column`).

V. ldmatrix.trans on pairs of bytes gives a thread two neighbouring columns of two neighbouring keys. The columns go to
two n8 tiles: the first has the even columns of 16, the second the odd ones (`output_column`).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32

from cute_flash.device.memory.ldmatrix import MmaOperand
from cute_flash.device.ptx import chosen_bytes, instruction
from cute_flash.planning.decode_tiles import ATOM_BYTES

LARGEST = 448.0
RUN = 64  # `query_column` permutes columns within runs of 64
NAN = 0x7F
# Half of the lowest of the 3 mantissa bits that FP8 keeps, as fp32 bits, minus 1. `rounded` also adds the value of that
# lowest bit, 0 or 1, so that ties go to even.
_HALF = 0x7FFFF
_MANTISSA_SHIFT = 20
_REBIAS = (127 - 7) << 3
_LEAST_NORMAL = 2.0**-6
_SUBNORMALS = 2.0**9  # 1 / spacing of the subnormal numbers


def query_column(column: Int32) -> Int32:
    """The column of the MMA operand Q at which a column of q is stored.

    Of 64 columns, thread t of a row reads columns 16 t ... 16 t + 15 of K. It uses four of them in each k-step, where
    the MMA takes them as columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    """
    run, inside = column // RUN * RUN, column % RUN
    thread, step, half, low = inside // 16, inside % 16 // 4, inside % 4 // 2, inside % 2
    return run + 16 * step + 8 * half + 2 * thread + low


def output_column(tile: int, column: Int32) -> Int32:
    """The output column of `column` (0 ... 7) in the n8 tile `tile` of the accumulator."""
    return 16 * (tile // 2) + 2 * column + tile % 2


def widened(word: Int32, has_cvt: bool) -> tuple[Int32, Int32]:
    """Four FP8 numbers as two registers of two fp16 numbers each. `has_cvt`: the GPU has an instruction for it."""
    if has_cvt:
        text = (
            "{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, {$r0};\n\t"
            "cvt.rn.f16x2.e4m3x2 {$w0}, low;\n\tcvt.rn.f16x2.e4m3x2 {$w1}, high;\n\t}"
        )
        return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=[word])
    return tuple(_shifted(chosen_bytes(word, Int32(0), Int32(selector))) for selector in (0x1404, 0x3424))


def _shifted(spread: Int32) -> Int32:
    """Convert FP8 in the high bytes of two halves to fp16: shift exponent and mantissa right by 1, multiply by 2^8.

    The shift turns NaN, and nothing else, into 1.875. Where it does, the result is set to all ones, which is NaN.
    """
    bits = (spread & Int32(-0x7FFF8000)) | ((spread >> 1) & Int32(0x3F803F80))
    # Copy to .b32 registers, the type that f16x2 instructions expect.
    text = (
        "{\n\t.reg .b32 a, b, c, n;\n\tmov.b32 a, {$r0};\n\tmov.b32 b, {$r1};\n\tmov.b32 c, {$r2};\n\t"
        "abs.f16x2 n, a;\n\tset.eq.u32.f16x2 n, n, c;\n\tmul.f16x2 a, a, b;\n\tor.b32 {$w0}, a, n;\n\t}"
    )
    return instruction(text, Int32, bits, Int32(0x5C005C00), Int32(0x3F803F80))


def column_pairs(word: Int32, dtype: type, has_cvt: bool) -> tuple[Int32, Int32]:
    """Four FP8 numbers, of two columns of two keys: the first column of both keys, and the second, in 16 bits.

    In bf16, NaN becomes 480. That does not matter for the values of a latent cache: the score of the key is NaN too.
    """
    if dtype == BFloat16:
        return _bf16(word << 8), _bf16(word)
    return widened(chosen_bytes(word, Int32(0), Int32(0x3120)), has_cvt)


def _bf16(spread: Int32) -> Int32:
    """Convert FP8 in the high bytes of two halves to bf16, except NaN: shift right by 4, multiply by 2^120."""
    bits = (spread & Int32(-0x7FFF8000)) | ((spread >> 4) & Int32(0x07F007F0))
    text = (
        "{\n\t.reg .b32 a, b, c;\n\tmov.b32 a, {$r0};\n\tmov.b32 b, {$r1};\n\tmov.b32 c, {$r2};\n\t"
        "fma.rn.bf16x2 {$w0}, a, b, c;\n\t}"
    )
    return instruction(text, Int32, bits, Int32(0x7B807B80), Int32(-0x7FFF8000))  # + -0, which keeps the sign of 0


@cute.jit
def rounded(x: Float32) -> Int32:
    """The bits of a number rounded to FP8, to nearest even; numbers beyond 448 become 448, and NaN stays NaN."""
    magnitude = cute.arch.fmin(cute.math.absf(x), Float32(LARGEST))
    bits = instruction("mov.b32 {$w0}, {$r0};", Int32, magnitude)
    normal = ((bits + _HALF + ((bits >> _MANTISSA_SHIFT) & 1)) >> _MANTISSA_SHIFT) - _REBIAS
    subnormal = instruction("cvt.rni.s32.f32 {$w0}, {$r0};", Int32, magnitude * _SUBNORMALS)
    result = normal if magnitude >= _LEAST_NORMAL else subnormal
    sign = (instruction("mov.b32 {$w0}, {$r0};", Int32, x) >> 24) & 0x80
    return Int32(NAN) if x != x else result | sign


class Fp8Tile(NamedTuple):
    """The keys or the values of one stage of a warp, in shared memory."""

    address: Int32
    lane: Int32
    num_keys: int  # rows in shared memory
    has_cvt: bool  # the GPU has an instruction that converts FP8 to fp16


@cute.jit
def add_scores(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    q: MmaOperand,
    keys: Fp8Tile,
    num_steps: cutlass.Constexpr,
    q_steps: cutlass.Constexpr,
):
    """S += Q K^T for the keys of a warp, in `num_steps` k-steps. Q of the first `q_steps` is in registers."""
    address, lane, num_keys, has_cvt = keys
    group = lane // 4
    fragment = cute.make_rmem_tensor(cute.make_layout(((2, 2), 2), stride=((1, 2), 4)), Float16)
    registers = cute.recast_tensor(fragment, Int32)
    # For each n8 tile: 16 bytes of one key.
    words = [cute.make_rmem_tensor(4, Int32) for _ in range(num_keys // 8)]
    acc_tiles = cute.logical_divide(acc, (None, None, 2))
    for run in cutlass.range_constexpr(num_steps * 16 // RUN):
        inside = run_offset(keys, run)
        for n in cutlass.range_constexpr(num_keys // 8):
            load_words(address + inside + (group + 8 * n) * ATOM_BYTES, words[n])
        for i in cutlass.range_constexpr(4):
            k = 4 * run + i
            if cutlass.const_expr(k >= q_steps):
                q.load(k, 0)
            for pair in cutlass.range_constexpr(num_keys // 16):
                for n in cutlass.range_constexpr(2):
                    registers[2 * n], registers[2 * n + 1] = widened(words[2 * pair + n][i], has_cvt)
                acc_pair = acc_tiles[None, None, (None, pair)]
                cute.gemm(tiled_mma, acc_pair, q.fragment[None, None, k], fragment, acc_pair)


def run_offset(keys: Fp8Tile, run: int) -> Int32:
    """The distance from a row of 8 to this thread's 16 bytes of a run of 64 columns, whose k-steps they serve."""
    group, thread = keys.lane // 4, keys.lane % 4
    chunk = 4 * run + thread
    return ((chunk % 8) ^ group) * 16 + (run // 2) * keys.num_keys * ATOM_BYTES


@cute.jit
def load_words(row: Int32, words: cute.Tensor):
    """Load four words, one for each k-step of a run."""
    source = cute.make_ptr(Int32, row, cutlass.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)


@cute.jit
def add_output(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, rP: cute.Tensor, values: Fp8Tile, first_chunk: Int32 | None = None
):
    """O += P V for the keys of a warp, in the dtype of P.

    `first_chunk`: the first of the warp's runs of 16 columns of V; None: it has all.
    """
    address, lane, num_keys, has_cvt = values
    key, chunk, dtype = lane % 16, lane // 16, rP.element_type
    fragment = cute.make_rmem_tensor(cute.make_layout(((2, 2), 4), stride=((1, 2), 4)), dtype)
    registers = cute.recast_tensor(fragment, Int32)
    acc_tiles = cute.logical_divide(acc, (None, None, 4))
    for c in cutlass.range_constexpr(cute.size(acc, mode=[2]) // 4):
        column = 2 * c + chunk  # the 16-byte chunk of the row that this lane's address points to
        atom = 2 * c // 8
        if cutlass.const_expr(first_chunk is not None):
            column = column + first_chunk
            atom = column // 8
        inside = ((column % 8) ^ (key % 8)) * 16 + atom * num_keys * ATOM_BYTES
        acc_c = acc_tiles[None, None, (None, c)]
        for k in cutlass.range_constexpr(num_keys // 16):
            words = ldmatrix_trans(address + (16 * k + key) * ATOM_BYTES + inside)
            # Matrices: keys 0-7 and 8-15 of the first chunk, then of the second.
            for n in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(2):
                    even_odd = column_pairs(words[2 * n + half], dtype, has_cvt)
                    registers[4 * n + half], registers[4 * n + 2 + half] = even_odd
            cute.gemm(tiled_mma, acc_c, rP[None, None, k], fragment, acc_c)


def ldmatrix_trans(address: Int32) -> tuple:
    """Four transposed 8x8 matrices of 16-bit elements."""
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[address])
