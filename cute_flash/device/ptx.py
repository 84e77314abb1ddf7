"""Inline PTX, where the compiler would move, merge or expand the plain operation."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

_CONVERT = {cutlass.BFloat16: "cvt.rn.bf16x2.f32", cutlass.Float16: "cvt.rn.f16x2.f32"}


def pack(low: Float32, high: Float32, dtype) -> Int32:
    """Convert two values to a 16-bit type, in one register; the compiler does not move it."""
    return cute.arch.inline_ptx(
        _CONVERT[dtype] + " {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


def rederived(value: Int32 | Float32) -> Int32 | Float32:
    """The same value, opaque to the compiler: it recomputes what depends on the value where that is used, instead of
    keeping it in registers over a loop.
    """
    dtype = Float32 if isinstance(value, Float32) else Int32
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[dtype], read_only_args=[value])


def select_if(condition: Boolean, a, b):
    """Select one of two values by one instruction. The compiler would turn a compound condition into a chain of
    selects, and keep their first operands.
    """
    dtype = Float32 if isinstance(a, Float32) else Int32
    return cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, {$r0}, 0;\n\tselp.b32 {$w0}, {$r1}, {$r2}, p;\n\t}",
        write_only_types=[dtype],
        read_only_args=[Int32(condition), a, b],
    )


def keep_masks(word: Uint32, threshold: Uint32) -> Int32:
    """Compare both 16-bit halves of a word, without their highest bits, with the threshold: all 16 bits of a half of
    the result are set unless that half is below it.

    The bits of positive floats are ordered like integers. NaNs are above all numbers, and compare as not below.
    """
    return cute.arch.inline_ptx(
        "{\n\t.reg .b32 t;\n\tabs.f16x2 t, {$r0};\n\tset.geu.u32.f16x2 {$w0}, t, {$r1};\n\t}",
        write_only_types=[Int32],
        read_only_args=[word, threshold],
    )


def chosen_bytes(low: Int32, high: Int32, selector: Int32) -> Int32:
    """Four bytes of eight, chosen by the digits of the selector."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[low, high, selector]
    )


def add_if(condition: Int32, address: Int64, value: Float32):
    """Add to global memory, atomically, if the condition is not 0."""
    cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, {$r0}, 0;\n\t@p red.relaxed.gpu.global.add.f32 [{$r1}], {$r2};\n\t}",
        read_only_args=[condition, address, value],
    )


_ROUND = {cutlass.BFloat16: "cvt.rn.bf16.f32", cutlass.Float16: "cvt.rn.f16.f32"}


def store_if(condition: Int32, address: Int64, value: Float32, dtype):
    """Store a value to global memory in a type if the condition is not 0, without a branch."""
    store = "@p st.global.f32 [{$r1}], {$r2};"
    if dtype in _ROUND:
        store = f".reg .b16 h;\n\t{_ROUND[dtype]} h, {{$r2}};\n\t@p st.global.b16 [{{$r1}}], h;"
    cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, {$r0}, 0;\n\t" + store + "\n\t}",
        read_only_args=[condition, address, value],
    )


def spread_signs(word: Int32, selector: int) -> Int32:
    """Four bytes of equal bits: the signs of the bytes chosen by the digits of the selector, less 8."""
    return chosen_bytes(word, Int32(0), Int32(selector))
