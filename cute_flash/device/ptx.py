"""Instructions written out, where the compiler would move or merge what the plain operation says."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

_CONVERT = {cutlass.BFloat16: "cvt.rn.bf16x2.f32", cutlass.Float16: "cvt.rn.f16x2.f32"}


def pack(low: Float32, high: Float32, dtype) -> Int32:
    """Two values in the 16-bit type, in one register; stays where it is written."""
    return cute.arch.inline_ptx(
        _CONVERT[dtype] + " {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


def rederived(value: Int32 | Float32) -> Int32 | Float32:
    """The same value, of which the compiler knows nothing more: what follows from it is computed where it is
    used instead of being kept in registers over a loop.
    """
    of = Float32 if isinstance(value, Float32) else Int32
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[of], read_only_args=[value])


def select_if(condition: Boolean, a, b):
    """One of two values by one instruction, where it is written: of a condition made of several the compiler
    would make a chain of choices, and keep what they begin with.
    """
    of = Float32 if isinstance(a, Float32) else Int32
    return cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, {$r0}, 0;\n\tselp.b32 {$w0}, {$r1}, {$r2}, p;\n\t}",
        write_only_types=[of],
        read_only_args=[Int32(condition), a, b],
    )


def kept_halves(draws: Uint32, threshold: Uint32) -> Int32:
    """Of two draws of 15 bits, above which there is one bit more, all 16 bits set if a draw is not below.

    As the bits of floats positive numbers are ordered like integers. Those of no number are above all others,
    and so they compare: not below.
    """
    return cute.arch.inline_ptx(
        "{\n\t.reg .b32 t;\n\tabs.f16x2 t, {$r0};\n\tset.geu.u32.f16x2 {$w0}, t, {$r1};\n\t}",
        write_only_types=[Int32],
        read_only_args=[draws, threshold],
    )


def chosen_bytes(low: Int32, high: Int32, selector: Int32) -> Int32:
    """Four bytes of eight: those that the digits of the selector say."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[low, high, selector]
    )


def add_if(condition: Int32, address: Int64, value: Float32):
    """An addition in global memory, in no order."""
    cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, {$r0}, 0;\n\t@p red.relaxed.gpu.global.add.f32 [{$r1}], {$r2};\n\t}",
        read_only_args=[condition, address, value],
    )


_ROUND = {cutlass.BFloat16: "cvt.rn.bf16.f32", cutlass.Float16: "cvt.rn.f16.f32"}


def store_if(condition: Int32, address: Int64, value: Float32, dtype):
    """A value to global memory in a type, without a branch."""
    store = "@p st.global.f32 [{$r1}], {$r2};"
    if dtype in _ROUND:
        store = f".reg .b16 h;\n\t{_ROUND[dtype]} h, {{$r2}};\n\t@p st.global.b16 [{{$r1}}], h;"
    cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, {$r0}, 0;\n\t" + store + "\n\t}",
        read_only_args=[condition, address, value],
    )


def spread_signs(word: Int32, selector: int) -> Int32:
    """Four times eight bits, equal to the signs of those bytes that the digits of the selector less 8 say."""
    return chosen_bytes(word, Int32(0), Int32(selector))
