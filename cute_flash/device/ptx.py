"""Inline PTX for operations that the compiler would move, merge or expand, or that the DSL does not have."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

# Instructions that convert one fp32 value, or two (x2), to a 16-bit type.
_ROUND = {cutlass.BFloat16: "cvt.rn.bf16{}.f32", cutlass.Float16: "cvt.rn.f16{}.f32"}
Scalar = Float32 | Int32 | Uint32 | Int64
# Declares the predicate p, which is true if the first argument is not 0.
_PREDICATE = ".reg .pred p;\n\tsetp.ne.s32 p, {$r0}, 0;\n\t"


def instruction(text: str, dtype: type, *args: Scalar) -> Scalar:
    """Emit PTX that reads `args`, and return its result of type `dtype`."""
    return cute.arch.inline_ptx(text, write_only_types=[dtype], read_only_args=list(args))


def pack(low: Float32, high: Float32, dtype: type) -> Int32:
    """Convert two values to a 16-bit type in one register. The compiler does not move the conversion."""
    return instruction(_ROUND[dtype].format("x2") + " {$w0}, {$r1}, {$r0};", Int32, low, high)


def rederived(value: Scalar) -> Scalar:
    """The same value, opaque to the compiler.

    The compiler then recomputes values that depend on it at each use, instead of keeping them in registers over a loop.
    """
    return instruction("mov.b32 {$w0}, {$r0};", Float32 if isinstance(value, Float32) else Int32, value)


def select_if(condition: Boolean, a: Scalar, b: Scalar) -> Scalar:
    """`a` if the condition holds, else `b`, by one selp.

    The compiler would turn a compound condition into a chain of selects, which needs more registers.
    """
    text = "{\n\t" + _PREDICATE + "selp.b32 {$w0}, {$r1}, {$r2}, p;\n\t}"
    return instruction(text, Float32 if isinstance(a, Float32) else Int32, Int32(condition), a, b)


def keep_masks(word: Uint32, threshold: Uint32) -> Int32:
    """Compare the low 15 bits of both 16-bit halves of a word with the threshold.

    A half of the result is 0 if the number is below the threshold, else all ones. The numbers are compared as positive
    fp16, whose bits are ordered like integers. NaN patterns count as not below (`geu`).
    """
    text = "{\n\t.reg .b32 t;\n\tabs.f16x2 t, {$r0};\n\tset.geu.u32.f16x2 {$w0}, t, {$r1};\n\t}"
    return instruction(text, Int32, word, threshold)


def chosen_bytes(low: Int32, high: Int32, selector: Int32) -> Int32:
    """Four of the eight bytes of two words, chosen by the hexadecimal digits of the selector (prmt)."""
    return instruction("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", Int32, low, high, selector)


def spread_signs(word: Int32, selector: int) -> Int32:
    """A word in which each byte repeats the sign bit of one byte of `word`: byte d - 8 for the selector's digit d."""
    return chosen_bytes(word, Int32(0), Int32(selector))


def tanh_derivative(t: Float32) -> Float32:
    """1 - t², saturated to [0, 1], so that a masked score (-inf) gives 0."""
    return instruction("fma.rn.sat.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32, -t, t, Float32(1.0))


def bits_and(x: Float32, bits: Int32) -> Int32:
    """The bits of `x` AND `bits`."""
    return instruction("and.b32 {$w0}, {$r0}, {$r1};", Int32, x, bits)


def add_if(condition: Int32, address: Int64, value: Float32):
    """Add to global memory atomically if the condition is not 0, without a branch."""
    text = "{\n\t" + _PREDICATE + "@p red.relaxed.gpu.global.add.f32 [{$r1}], {$r2};\n\t}"
    cute.arch.inline_ptx(text, read_only_args=[condition, address, value])


def store_if(condition: Int32, address: Int64, value: Float32 | Int32, dtype: type):
    """Store a value to global memory, converted to `dtype`, if the condition is not 0, without a branch."""
    store = f"@p st.global.{'s32' if dtype is Int32 else 'f32'} [{{$r1}}], {{$r2}};"
    if dtype in _ROUND:
        store = f".reg .b16 h;\n\t{_ROUND[dtype].format('')} h, {{$r2}};\n\t@p st.global.b16 [{{$r1}}], h;"
    text = "{\n\t" + _PREDICATE + store + "\n\t}"
    cute.arch.inline_ptx(text, read_only_args=[condition, address, value])
