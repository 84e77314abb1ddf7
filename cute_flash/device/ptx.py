"""Instructions written out, where the compiler would move or merge what the plain operation says."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

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
