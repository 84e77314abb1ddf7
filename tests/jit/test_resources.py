"""Reading the resources of a kernel from ptxas remarks, PTX and SASS. No kernel is compiled."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from cute_flash.jit import compile as compiling
from cute_flash.jit import resources as reading
from cute_flash.jit.digest import digest
from cute_flash.jit.disk import DiskCache
from cute_flash.jit.kernels import precompile
from cute_flash.jit.resources import Resources, disassemble, kernel_resources
from cute_flash.planning.plan import CompileKey, Plan, plan_forward
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import Problem

REMARKS = """\x1b[1minfo\x1b[0m    : 0 bytes gmem
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
    Used 168 registers, used 1 barriers
    (C7510) wgmma was serialised
"""
SASS = """
        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0010*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R14, R4 ;
        /*0020*/               @P1 MUFU.EX2 R3, R3 ;
        /*0030*/             @!UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*10040*/                  BRA `(.L_1) ;
.L_1:
"""


class FakeKernel:
    __cubin__ = b"x" * 5000
    __ptx__ = ".visible .entry cute_flash_fwd_test(\n"


def plan_of() -> Plan:
    return plan_forward(Problem(2, 8, 4, 1000, 1000, 64), ARCHS["sm_80"])


def compile_printing(*remarks: str) -> Callable[[CompileKey, str], FakeKernel]:
    """A stand-in for the compiler that prints the remarks of ptxas for some kernels."""

    def compile_with_remarks(key: CompileKey, options: str) -> FakeKernel:
        assert "remarks{ptx}" in options
        for text in remarks:
            print(text, file=sys.stderr)
        return FakeKernel()

    return compile_with_remarks


def test_all_kernels_of_a_launch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    few = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 32 registers"
    more = "8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\nUsed 40 registers"
    monkeypatch.setattr(compiling, "cute_compile", compile_printing(few, REMARKS, more))
    monkeypatch.setattr(reading, "disassemble", lambda cubin: SASS)
    found = kernel_resources(plan_of().main)
    assert (found.registers, found.stack_bytes) == (168, 8)
    assert (found.spill_store_bytes, found.spill_load_bytes) == (16, 20)


def test_remarks_of_ptxas_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "cute_compile", compile_printing(REMARKS))
    monkeypatch.setattr(reading, "disassemble", lambda cubin: SASS)
    found = kernel_resources(plan_of().main)
    assert (found.registers, found.stack_bytes, found.spill_bytes) == (168, 8, 28)
    assert found.smem_bytes == plan_of().tile.smem_bytes
    assert found.serialised_wgmma == ("C7510",)
    assert (found.symbol, len(found.cubin)) == ("cute_flash_fwd_test", 5000)
    assert found.sass == Counter({"HMMA": 2, "MUFU": 1, "BRA": 1, "UIADD3": 1})
    text = "\n".join(found.lines())
    for part in ("168 a thread, 28 bytes spilled", "HMMA 2", "cute_flash_fwd_test (sm_80)"):
        assert part in text
    assert (found.setmaxnreg, found.mma) == ((), "2 HMMA")


def test_silence_of_ptxas_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "cute_compile", lambda key, options: FakeKernel())
    with pytest.raises(RuntimeError, match="ptxas printed no resource usage"):
        kernel_resources(plan_of().main)


def test_setmaxnreg_is_read_from_the_ptx() -> None:
    ptx = "setmaxnreg.dec.sync.aligned.u32 \t24;\n" + 2 * "setmaxnreg.inc.sync.aligned.u32 \t240;\n"
    found = Resources("fwd", "sm_90a", 168, 0, 0, 0, 1024, (), Counter({"HGMMA": 48, "UTMALDG": 7}), ptx=ptx)
    assert found.setmaxnreg == (24, 240)
    assert found.mma == "48 HGMMA"
    text = "\n".join(found.lines())
    for part in ("168 at launch, then 24 or 240 a thread, 0 bytes", "HGMMA 48, UTMALDG 7", "fwd (sm_90a)"):
        assert part in text


def test_without_a_disassembler_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "nvdisasm", lambda: None)
    assert disassemble(b"cubin") == ""
    found = Resources("fwd", "sm_90a", 168, 0, 0, 0, 1024, ())
    assert found.mma == "MMAs not counted (no nvdisasm)"
    assert "pip install nvidia-cuda-nvdisasm" in "\n".join(found.lines())


def test_cached_resources_compile_once(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call reads the disk cache, which has the kernel too, for launches."""
    compiled = mock.Mock(side_effect=compile_printing(REMARKS))
    monkeypatch.setattr(compiling, "cute_compile", compiled)
    monkeypatch.setattr(compiling, "export", lambda function: (b"shared object", ".so"))
    monkeypatch.setattr(reading, "disassemble", lambda cubin: "")
    key, cache = plan_of().main, DiskCache(fresh_cache)
    first = reading.cached_resources(key)
    assert (first.registers, first.cubin, first.sass) == (168, FakeKernel.__cubin__, Counter())
    assert reading.cached_resources(key) == first and compiled.call_count == 1
    assert [path.stem for path in cache.files()] == [digest(key)] and not precompile(key)
    # Instructions are counted as soon as there is a disassembler.
    monkeypatch.setattr(reading, "disassemble", lambda cubin: SASS)
    assert reading.cached_resources(key).sass["HMMA"] == 2 and compiled.call_count == 1
    cache.clear()
    assert {path.suffix for path in fresh_cache.iterdir()} == {".lock"}
