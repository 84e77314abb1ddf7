"""Stand-ins on the CPU: for instructions of the GPU, and for symbols that an x86_64 machine may not have."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from typing import Any

import pytest

# LLVM calls this function to convert fp32 to bf16 on a CPU that has no instruction for it. libgcc has it since GCC 13.
# The result is in the low 16 bits of the register that returns a float.
TO_BF16 = r"""
#include <stdint.h>
#include <string.h>
float __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  memcpy(&x, &bits, 4);
  return x;
}
"""


@pytest.fixture(scope="session")
def conversion_to_bf16(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For tests that convert fp32 to bf16."""
    if platform.machine() != "x86_64" or hasattr(ctypes.CDLL(None), "__truncsfbf2"):
        return
    if shutil.which("cc") is None:
        pytest.skip("no __truncsfbf2 in libgcc, and no C compiler")
    folder = tmp_path_factory.mktemp("to_bf16")
    source, library = folder / "to_bf16.c", folder / "to_bf16.so"
    source.write_text(TO_BF16)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@pytest.fixture
def on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace GPU-only instructions by their effect on a single thread.

    All threads of a row hold the same values, so a shuffle returns the thread's own value.
    """
    import cutlass
    from cutlass import Float32, cute

    from cute_flash.device.scores import philox

    def fmin(a: Any, b: Any, nan: bool = False) -> Any:
        return cutlass.min(a, Float32(b))

    def fmax(a: Any, b: Any, nan: bool = False) -> Any:
        return cutlass.max(a, b)

    for name in ("make_warp_uniform", "vote_all_sync", "vote_any_sync"):
        monkeypatch.setattr(cute.arch, name, lambda value: value)
    monkeypatch.setattr(cute.arch, "shuffle_sync_bfly", lambda value, offset: value)
    monkeypatch.setattr(cute.arch, "fmin", fmin)
    monkeypatch.setattr(cute.arch, "fmax", fmax)
    monkeypatch.setattr(cute.arch, "rcp_approx", lambda value: Float32(1.0) / value)
    monkeypatch.setattr(philox, "keep_masks", keep_masks)


def keep_masks(word: Any, threshold: Any) -> Any:
    """`philox.keep_masks` by integer comparisons: a number is kept if it is not below the threshold."""
    import cutlass
    from cutlass import Int32

    halves = [((word >> shift) & 0x7FFF) >= ((threshold >> shift) & 0x7FFF) for shift in (0, 16)]
    low, high = (
        cutlass.select_(half, Int32(bits), Int32(0)) for half, bits in zip(halves, (0xFFFF, -65536), strict=True)
    )
    return low | high
