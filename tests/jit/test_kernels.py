"""Compiled kernels: from memory, then from disk, then from the compiler, once. `test_pack` tests the installed pack,
`test_digest` the names of entries.

Most tests replace the compiler by a function that returns a few bytes.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cute_flash.jit import kernels
from cute_flash.jit.digest import digest
from cute_flash.jit.disk import CacheWarning, DiskCache
from cute_flash.jit.kernels import CacheInfo, cache_info, compiled_kernel, forget, precompile
from cute_flash.planning.plan import CompileKey, plan_backward, plan_forward
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem

OBJECT = b"an object file"


def key_of(target: str = "sm_80", family: str = "sm80", **fields: object) -> CompileKey:
    problem = dataclasses.replace(Problem(1, 2, 2, 100, 100, 64), **fields)  # type: ignore[arg-type]
    return plan_forward(problem, ARCHS[target], family).main


@pytest.fixture
def builds(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[CompileKey]:
    """The keys that the stand-in for the compiler was given. Its kernels return their own bytes."""
    keys: list[CompileKey] = []

    def build(key: CompileKey) -> tuple[bytes, str]:
        keys.append(key)
        return OBJECT, ".so"

    monkeypatch.setattr(kernels, "compile_object", build)
    monkeypatch.setattr(kernels, "load_object", lambda path: path.read_bytes)
    return keys


# Memory, disk, compiler


def test_compiled_once_then_from_memory_then_from_disk(builds: list[CompileKey]) -> None:
    key = key_of()
    function = compiled_kernel(key)
    assert function() == OBJECT
    assert cache_info() == CacheInfo(compiles=1)
    assert compiled_kernel(key_of(batch=7, seqlen_k=9, band=Band())) is function
    assert cache_info() == CacheInfo(compiles=1, memory_hits=1)
    forget()
    assert compiled_kernel(key)() == OBJECT
    assert cache_info() == CacheInfo(compiles=1, disk_hits=1, memory_hits=1)
    assert builds == [key]


def test_every_key_has_its_own_entry(builds: list[CompileKey], fresh_cache: Path) -> None:
    keys = [
        key_of(),
        key_of("sm_90"),
        key_of("sm_90", "sm90"),
        key_of(dtype="float16"),
        key_of(head_dim=128),
        key_of(band=Band(None, 0)),
        key_of(band=Band(0, None)),
    ]
    for key in keys:
        compiled_kernel(key)
    assert builds == keys
    assert {path.stem for path in fresh_cache.glob("*.so")} == set(map(digest, keys))


def test_a_damaged_entry_is_compiled_again(builds: list[CompileKey], fresh_cache: Path) -> None:
    compiled_kernel(key_of())
    forget()
    (fresh_cache / f"{digest(key_of())}.so").write_bytes(OBJECT[:-1])
    assert compiled_kernel(key_of())() == OBJECT
    assert cache_info() == CacheInfo(compiles=2)
    forget()
    # The next process finds a valid entry.
    assert compiled_kernel(key_of())() == OBJECT
    assert cache_info() == CacheInfo(compiles=2, disk_hits=1)


def test_an_unusable_folder_costs_the_cache_and_nothing_else(
    builds: list[CompileKey], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUTE_FLASH_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(CacheWarning, match="compiling for this process only"):
        assert compiled_kernel(key_of())() == OBJECT
    assert compiled_kernel(key_of())() == OBJECT
    assert cache_info() == CacheInfo(compiles=1, memory_hits=1)


def test_precompile(builds: list[CompileKey]) -> None:
    assert precompile(key_of()) is True
    assert precompile(key_of()) is False
    assert compiled_kernel(key_of())() == OBJECT
    assert cache_info() == CacheInfo(compiles=1, disk_hits=1)
    assert builds == [key_of()]


def test_a_failure_stores_nothing_and_blocks_nobody(
    builds: list[CompileKey], fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(key: CompileKey) -> tuple[bytes, str]:
        raise RuntimeError("ptxas said no")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "compile_object", broken)
        with pytest.raises(RuntimeError, match="ptxas said no"):
            compiled_kernel(key_of())
        with pytest.raises(RuntimeError, match="ptxas said no"):
            precompile(key_of())
    assert list(fresh_cache.glob("*.so")) == []
    assert cache_info() == CacheInfo()
    assert compiled_kernel(key_of())() == OBJECT


def test_threads_compile_once(builds: list[CompileKey], monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(key: CompileKey) -> tuple[bytes, str]:
        builds.append(key)
        time.sleep(0.1)
        return OBJECT, ".so"

    monkeypatch.setattr(kernels, "compile_object", slow)
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(compiled_kernel(key_of())())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [OBJECT] * 4
    assert len(builds) == 1
    assert cache_info() == CacheInfo(compiles=1, memory_hits=3)


def test_processes_compile_once(builds: list[CompileKey], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(2), context.SimpleQueue()

    def slow(key: CompileKey) -> tuple[bytes, str]:
        with open(tmp_path / "builds", "a") as log:
            log.write("x")
        time.sleep(0.3)
        return OBJECT, ".so"

    def race() -> None:
        start.wait(60)
        function, info = compiled_kernel(key_of()), cache_info()
        answers.put((function() == OBJECT, info.compiles, info.disk_hits))

    monkeypatch.setattr(kernels, "compile_object", slow)
    racers = [context.Process(target=race) for _ in range(2)]
    for racer in racers:
        racer.start()
    assert sorted(answers.get() for _ in racers) == [(True, 0, 1), (True, 1, 0)]
    for racer in racers:
        racer.join()
    assert (tmp_path / "builds").read_text() == "x"


# The real compiler

SECOND_PROCESS = """
import json, sys
from cute_flash.jit import kernels
from cute_flash.planning.plan import plan_forward
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import Problem
function = kernels.compiled_kernel(plan_forward(Problem(3, 4, 2, 777, 888, 64), ARCHS["sm_80"]).main)
print(json.dumps({
    "imported": sorted({"cutlass", "tvm_ffi"} & set(sys.modules)),
    "info": vars(kernels.cache_info()),
    "callable": callable(function),
}))
"""


def check_arguments(function: Callable[..., None], key: CompileKey) -> None:
    """Assert that it is the kernel: it takes the arguments of its registry row, and only CUDA tensors."""
    with pytest.raises(TypeError, match=f"Expects {len(key.operands)} parameters"):
        function()
    tensor = torch.zeros(1, 2, 5, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"Mismatched Tensor on argument #0"):
        function(tensor, *(None,) * (len(key.operands) - 1))


@pytest.mark.compiles
def test_a_second_process_loads_without_the_dsl(fresh_cache: Path) -> None:
    check_arguments(compiled_kernel(key_of()), key_of())
    assert cache_info() == CacheInfo(compiles=1)
    command = [sys.executable, "-c", SECOND_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["info"] == {"compiles": 0, "disk_hits": 1, "pack_hits": 0, "memory_hits": 0}
    assert answer["imported"] == ["tvm_ffi"]
    assert answer["callable"]


@pytest.mark.compiles
def test_without_a_linker_an_object_file_is_stored(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    # The smallest kernel.
    key = plan_backward(Problem(1, 2, 2, 100, 100, 64), ARCHS["sm_80"]).launch("bwd_postprocess")
    check_arguments(compiled_kernel(key), key)
    assert DiskCache(fresh_cache).files() == [fresh_cache / f"{digest(key)}.o"]
    forget()
    assert precompile(key) is False
    check_arguments(compiled_kernel(key), key)
    assert cache_info() == CacheInfo(compiles=1, disk_hits=1)
