"""The compile cache: memory, then disk, then the compiler once. What makes an entry: see `test_digest`.

Where the compiler's work does not matter, a stand-in writes a few bytes in its place.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cute_flash.jit import compile as compiling
from cute_flash.jit.compile import CacheInfo, cache_info, compiled, digest, forget, precompile
from cute_flash.jit.disk import CacheWarning, DiskCache
from cute_flash.planning.plan import CompileKey, Plan, plan
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Problem

OBJECT = b"an object file"


def plan_of(target: str = "sm_80", family: str = "sm80", **fields: object) -> Plan:
    with use_kernels(family):
        problem = dataclasses.replace(Problem(1, 2, 2, 100, 100, 64), **fields)  # type: ignore[arg-type]
        return plan(problem, ARCHS[target])


@pytest.fixture
def builds(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[CompileKey]:
    """The keys that the stand-in for the compiler was given. Its kernels return their own bytes."""
    keys: list[CompileKey] = []

    def build(key: CompileKey) -> tuple[bytes, str]:
        keys.append(key)
        return OBJECT, ".so"

    monkeypatch.setattr(compiling, "_compile_object", build)
    monkeypatch.setattr(compiling, "_load", lambda path: path.read_bytes)
    return keys


# Memory, disk, compiler


def test_compiled_once_then_from_memory_then_from_disk(builds: list[CompileKey]) -> None:
    the_plan = plan_of()
    function = compiled(the_plan)
    assert function() == OBJECT
    assert cache_info() == CacheInfo(compiles=1)
    assert compiled(plan_of(batch=7, seqlen_k=9, band=Band())) is function
    assert cache_info() == CacheInfo(compiles=1, memory_hits=1)
    forget()
    assert compiled(the_plan)() == OBJECT
    assert cache_info() == CacheInfo(compiles=1, disk_hits=1, memory_hits=1)
    assert builds == [the_plan.key]


def test_every_key_has_its_own_entry(builds: list[CompileKey], fresh_cache: Path) -> None:
    plans = [
        plan_of(),
        plan_of("sm_90"),
        plan_of("sm_90", "sm90"),
        plan_of(dtype="float16"),
        plan_of(head_dim=128),
        plan_of(band=Band(None, 0)),
        plan_of(band=Band(0, None)),
    ]
    for each in plans:
        compiled(each)
    assert builds == [each.key for each in plans]
    assert {path.stem for path in fresh_cache.glob("*.so")} == {digest(each.key) for each in plans}


def damage_content(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes()[1:])


def damage_sum(path: Path) -> None:
    path.with_name(path.name + ".sha256").write_text("0" * 64)


@pytest.mark.parametrize(
    "damage",
    [damage_content, damage_sum, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink],
    ids=["altered", "wrong checksum", "truncated", "deleted"],
)
def test_a_damaged_entry_is_compiled_again(
    builds: list[CompileKey], fresh_cache: Path, damage: Callable[[Path], None]
) -> None:
    compiled(plan_of())
    forget()
    damage(fresh_cache / f"{digest(plan_of().key)}.so")
    assert compiled(plan_of())() == OBJECT
    assert cache_info() == CacheInfo(compiles=2)
    forget()
    # Mended for the next one.
    assert compiled(plan_of())() == OBJECT
    assert cache_info() == CacheInfo(compiles=2, disk_hits=1)


def test_an_entry_that_others_may_write_is_compiled_again(
    builds: list[CompileKey], fresh_cache: Path
) -> None:
    compiled(plan_of())
    forget()
    (fresh_cache / f"{digest(plan_of().key)}.so").chmod(0o666)
    with pytest.warns(CacheWarning, match="writable by others"):
        compiled(plan_of())
    assert len(builds) == 2


def test_an_unusable_folder_costs_the_cache_and_nothing_else(
    builds: list[CompileKey], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUTE_FLASH_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(CacheWarning, match="compiling for this process only"):
        assert compiled(plan_of())() == OBJECT
    assert compiled(plan_of())() == OBJECT
    assert cache_info() == CacheInfo(compiles=1, memory_hits=1)


def test_precompile(builds: list[CompileKey]) -> None:
    assert precompile(plan_of().key) is True
    assert precompile(plan_of().key) is False
    assert compiled(plan_of())() == OBJECT
    assert cache_info() == CacheInfo(compiles=1, disk_hits=1)
    assert builds == [plan_of().key]


def test_a_failure_stores_nothing_and_blocks_nobody(
    builds: list[CompileKey], fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(key: CompileKey) -> tuple[bytes, str]:
        raise RuntimeError("ptxas said no")

    with monkeypatch.context() as patch:
        patch.setattr(compiling, "_compile_object", broken)
        with pytest.raises(RuntimeError, match="ptxas said no"):
            compiled(plan_of())
        with pytest.raises(RuntimeError, match="ptxas said no"):
            precompile(plan_of().key)
    assert list(fresh_cache.glob("*.so")) == []
    assert cache_info() == CacheInfo()
    assert compiled(plan_of())() == OBJECT


def test_threads_compile_once(builds: list[CompileKey], monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(key: CompileKey) -> tuple[bytes, str]:
        builds.append(key)
        time.sleep(0.1)
        return OBJECT, ".so"

    monkeypatch.setattr(compiling, "_compile_object", slow)
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(compiled(plan_of())())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [OBJECT] * 4
    assert len(builds) == 1
    assert cache_info() == CacheInfo(compiles=1, memory_hits=3)


RACER = """
import sys, time
from pathlib import Path
from cute_flash.jit import compile as compiling
from cute_flash.spec.arch import ARCHS
from cute_flash.planning.plan import plan
from cute_flash.spec.problem import Problem

meeting, number, racers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def slow(key):
    with open(meeting / "builds", "a") as log:
        log.write(number)
    time.sleep(0.5)
    return b"an object file", ".so"

compiling._compile_object = slow
compiling._load = lambda path: path.read_bytes
the_plan = plan(Problem(1, 2, 2, 100, 100, 64), ARCHS["sm_80"])
(meeting / f"ready{number}").touch()
while len(list(meeting.glob("ready*"))) < racers:
    time.sleep(0.005)
assert compiling.compiled(the_plan)() == b"an object file"
print(compiling.cache_info().compiles, compiling.cache_info().disk_hits)
"""


def test_processes_compile_once(fresh_cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACER, str(tmp_path)]
    racers = [
        subprocess.Popen([*command, str(number), "4"], stdout=subprocess.PIPE, text=True)
        for number in range(4)
    ]
    answers = sorted(racer.communicate(timeout=120)[0].split() for racer in racers)
    assert [racer.returncode for racer in racers] == [0] * 4
    assert len((tmp_path / "builds").read_text()) == 1
    assert answers == [["0", "1"]] * 3 + [["1", "0"]]


# The real compiler

SECOND_PROCESS = """
import json, sys, torch, time
start = time.perf_counter()
from cute_flash.jit import compile as compiling
from cute_flash.spec.arch import ARCHS
from cute_flash.planning.plan import plan
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Problem
target, family = sys.argv[1:]
with use_kernels(family):
    function = compiling.compiled(plan(Problem(3, 4, 2, 777, 888, 64), ARCHS[target]))
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "imported": sorted({"cutlass", "tvm_ffi"} & set(sys.modules)),
    "info": vars(compiling.cache_info()),
    "callable": callable(function),
}))
"""


def assert_checks_its_arguments(function: Callable[..., None], num_numbers: int = 1) -> None:
    """It is the kernel: it wants CUDA tensors of the shapes it was compiled for, and as many numbers."""
    q, lse = torch.zeros(1, 2, 5, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 5)
    with pytest.raises(ValueError, match=r"Mismatched Tensor on argument #0 .*bfloat16"):
        function(q, q, q, q, lse, 1.0, 0, 0, *(1,) * num_numbers)
    with pytest.raises(TypeError, match=f"Expects {8 + num_numbers} parameters"):
        function(q)


# The section; on Hopper also the size of the grid, the rows of a head, and the address of a counter.
@pytest.mark.compiles
@pytest.mark.parametrize(("target", "family", "num_numbers"), [("sm_80", "sm80", 1), ("sm_90", "sm90", 4)])
def test_a_second_process_loads_without_the_dsl(
    target: str, family: str, num_numbers: int, fresh_cache: Path
) -> None:
    assert_checks_its_arguments(compiled(plan_of(target, family)), num_numbers)
    assert cache_info() == CacheInfo(compiles=1)
    command = [sys.executable, "-c", SECOND_PROCESS, target, family]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["info"] == {"compiles": 0, "disk_hits": 1, "memory_hits": 0}
    assert answer["imported"] == ["tvm_ffi"]
    assert answer["callable"]
    assert answer["seconds"] < 1.0


@pytest.mark.compiles
def test_without_a_linker_the_entry_is_an_object_file(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert_checks_its_arguments(compiled(plan_of()))
    assert DiskCache(fresh_cache).files() == [fresh_cache / f"{digest(plan_of().key)}.o"]
    forget()
    assert precompile(plan_of().key) is False
    assert_checks_its_arguments(compiled(plan_of()))
    assert cache_info() == CacheInfo(compiles=1, disk_hits=1)
