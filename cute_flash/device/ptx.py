"""Inline PTX, where the compiler would move, merge or expand the plain operation."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

# Round one value or two to a 16-bit type.
_ROUND = {cutlass.BFloat16: "cvt.rn.bf16{}.f32", cutlass.Float16: "cvt.rn.f16{}.f32"}
# The first argument as a predicate.
_PREDICATE = ".reg .pred p;\n\tsetp.ne.s32 p, {$r0}, 0;\n\t"


def instruction(text: str, dtype, *args):
    """The result of an instruction, of a type, that reads these arguments."""
    return cute.arch.inline_ptx(text, write_only_types=[dtype], read_only_args=list(args))


def pack(low: Float32, high: Float32, dtype) -> Int32:
    """Convert two values to a 16-bit type, in one register; the compiler does not move it."""
    return instruction(_ROUND[dtype].format("x2") + " {$w0}, {$r1}, {$r0};", Int32, low, high)


def rederived(value: Int32 | Float32) -> Int32 | Float32:
    """The same value, opaque to the compiler: it recomputes what depends on the value where that is used, instead of
    keeping it in registers over a loop.
    """
    return instruction("mov.b32 {$w0}, {$r0};", Float32 if isinstance(value, Float32) else Int32, value)


def select_if(condition: Boolean, a, b):
    """Select one of two values by one instruction. The compiler would turn a compound condition into a chain of
    selects, and keep their first operands.
    """
    text = "{\n\t" + _PREDICATE + "selp.b32 {$w0}, {$r1}, {$r2}, p;\n\t}"
    return instruction(text, Float32 if isinstance(a, Float32) else Int32, Int32(condition), a, b)


def keep_masks(word: Uint32, threshold: Uint32) -> Int32:
    """Compare both 16-bit halves of a word, without their highest bits, with the threshold: all 16 bits of a half of
    the result are set unless that half is below it.

    The bits of positive floats are ordered like integers. NaNs are above all numbers, and compare as not below.
    """
    text = "{\n\t.reg .b32 t;\n\tabs.f16x2 t, {$r0};\n\tset.geu.u32.f16x2 {$w0}, t, {$r1};\n\t}"
    return instruction(text, Int32, word, threshold)


def chosen_bytes(low: Int32, high: Int32, selector: Int32) -> Int32:
    """Four bytes of eight, chosen by the digits of the selector."""
    return instruction("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", Int32, low, high, selector)


def spread_signs(word: Int32, selector: int) -> Int32:
    """Four bytes of equal bits: the signs of the bytes chosen by the digits of the selector, less 8."""
    return chosen_bytes(word, Int32(0), Int32(selector))


def tanh_derivative(t: Float32) -> Float32:
    """1 - t², and 0 for a masked score, -inf"""
    return instruction("fma.rn.sat.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32, -t, t, Float32(1.0))


def bits_and(x: Float32, bits: Int32) -> Int32:
    return instruction("and.b32 {$w0}, {$r0}, {$r1};", Int32, x, bits)


def add_if(condition: Int32, address: Int64, value: Float32):
    """Add to global memory, atomically, if the condition is not 0."""
    text = "{\n\t" + _PREDICATE + "@p red.relaxed.gpu.global.add.f32 [{$r1}], {$r2};\n\t}"
    cute.arch.inline_ptx(text, read_only_args=[condition, address, value])


def store_if(condition: Int32, address: Int64, value: Float32 | Int32, dtype):
    """Store a value to global memory in a type if the condition is not 0, without a branch."""
    store = f"@p st.global.{'s32' if dtype is Int32 else 'f32'} [{{$r1}}], {{$r2}};"
    if dtype in _ROUND:
        store = f".reg .b16 h;\n\t{_ROUND[dtype].format('')} h, {{$r2}};\n\t@p st.global.b16 [{{$r1}}], h;"
    text = "{\n\t" + _PREDICATE + store + "\n\t}"
    cute.arch.inline_ptx(text, read_only_args=[condition, address, value])
