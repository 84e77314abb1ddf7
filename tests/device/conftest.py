"""Symbols that the CPU code of device functions needs and an x86_64 machine may not have."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess

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
