"""`cute-flash pack`: the kernels of the table, and the wheel. `tests/jit/test_pack.py` tests the use of a pack."""

from __future__ import annotations

import base64
import csv
import hashlib
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_flash
from cute_flash.decode import bind
from cute_flash.jit import kernels
from cute_flash.jit.compile import linker
from cute_flash.jit.digest import build_facts, digest
from cute_flash.jit.disk import DiskCache
from cute_flash.planning.launch import LaunchKey
from cute_flash.planning.plan import plan_attention, plan_backward, plan_forward
from cute_flash.runtime import decode
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ARCHS, ArchSpec
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem
from cute_flash.tools import pack_table
from cute_flash.tools.cli import main
from cute_flash.tools.pack import build_pack, write_wheel
from cute_flash.tools.pack_table import TABLE, pack_keys
from tests.fakes.recording import RecordingGpu

OBJECTS = {"sm_80": {"a" * 40: b"first", "b" * 40: b"second"}, "sm_90a": {"c" * 40: b"third"}}

# The table


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_every_row_adds_kernels(arch: ArchSpec) -> None:
    keys: list[LaunchKey] = []
    for row in TABLE:
        new = [key for key in row.keys(arch) if key not in keys]
        assert new, row
        keys += new
    assert keys == pack_keys(arch)
    assert len(set(map(digest, keys))) == len(keys)


def common_problems() -> Iterator[Problem]:
    """Training and prefill in the sizes of models."""
    for head_dim, dtype, band in (
        (64, "bfloat16", Band()),
        (64, "float16", Band(None, 0)),
        (96, "bfloat16", Band(None, 0)),
        (128, "bfloat16", Band(None, 0)),
        (128, "bfloat16", Band(4095, 0)),
        (128, "float16", Band()),
        (256, "bfloat16", Band(None, 0)),
    ):
        yield Problem(2, 32, 8, 4096, 4096, head_dim, dtype, band)
        yield Problem(1, 16, 16, 512, 512, head_dim, dtype, band)
    yield Problem(1, 128, 128, 4096, 4096, 192, "bfloat16", Band(None, 0), 128)
    yield Problem(4, 32, 8, 9000, 9000, 128, "bfloat16", Band(None, 0), varlen=True)
    for feature in ("softcap", "alibi", "dropout"):
        yield Problem(2, 32, 8, 4096, 4096, 128, "bfloat16", Band(None, 0), features=(feature,))


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_the_pack_covers_common_calls(arch: ArchSpec) -> None:
    keys = set(pack_keys(arch))
    for problem in common_problems():
        assert {*plan_attention(problem, arch, can_pack_gqa=True).host_calls} <= keys, problem
        assert {*plan_backward(problem, arch).host_calls} <= keys, problem
    deterministic = Problem(2, 32, 8, 4096, 4096, 128, "bfloat16", Band(None, 0))
    assert {*plan_backward(deterministic, arch, deterministic=True).host_calls} <= keys
    # A token of a generation with `attn`.
    for batch in (1, 8):
        assert {*plan_attention(Problem(batch, 32, 8, 1, 5000, 128), arch).host_calls} <= keys


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
@pytest.mark.parametrize("page_size", [None, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_pack_covers_decoding(arch: ArchSpec, page_size: int | None, stored: torch.dtype) -> None:
    keys = set(pack_keys(arch))
    for batch, appends in itertools.product((1, 64), (False, True)):
        gpu = RecordingGpu(arch)
        with use_gpu(gpu):
            decode._bind(*decode_call(batch, page_size, appends, stored))
        assert gpu.keys
        # FP8 caches have pages.
        assert set(gpu.keys) <= keys or (stored != torch.bfloat16 and page_size is None)


def decode_call(batch: int, page_size: int | None, appends: bool, stored: torch.dtype) -> tuple[Any, ...]:
    lengths = torch.zeros(batch, dtype=torch.int32)
    options: dict[str, Any] = {"cache_seqlens": lengths}
    rows = batch, 1024
    if page_size is not None:
        rows = batch * 1024 // page_size, page_size
        options["page_table"] = torch.zeros(batch, 1024 // page_size, dtype=torch.int32)
    if appends:
        options |= {name: torch.empty(batch, 1, 8, 128, dtype=torch.bfloat16) for name in ("k_new", "v_new")}
    caches = torch.empty(2, *rows, 8, 128, dtype=stored).unbind(0)
    return bind(torch.empty(batch, 1, 32, 128, dtype=torch.bfloat16), *caches, **options)


def latent_call(batch: int, heads: int, page_size: int | None, *, appends: bool, fp8: bool) -> tuple[Any, ...]:
    options: dict[str, Any] = dict(value_dim=512, scale=192**-0.5, cache_seqlens=torch.zeros(batch, dtype=torch.int32))
    rows = batch, 1024
    if page_size is not None:
        rows = batch * 1024 // page_size, page_size
        options["page_table"] = torch.zeros(batch, 1024 // page_size, dtype=torch.int32)
    if appends:
        options["k_new"] = torch.empty(batch, 1, 1, 576, dtype=torch.bfloat16)
    cache = torch.empty(*rows, 1, 576, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    return bind(torch.empty(batch, 1, heads, 576, dtype=torch.bfloat16), cache, **options)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_the_pack_covers_latent_caches(arch: ArchSpec) -> None:
    gpu = RecordingGpu(arch)
    calls = [
        latent_call(batch, heads, page_size, appends=appends, fp8=fp8)
        for batch, heads in itertools.product((1, 128), (8, 16, 64, 128))
        for page_size, appends, fp8 in ((64, False, False), (16, True, False), (None, False, False), (64, False, True))
    ]
    tables = dict(page_table=torch.zeros(4, 2, 2048, dtype=torch.int32), cache_seqlens=2048)
    for heads in (16, 128):
        q, rows = torch.empty(4, 2, heads, 576, dtype=torch.bfloat16), torch.empty(999, 1, 1, 576, dtype=torch.bfloat16)
        calls.append(bind(q, rows, value_dim=512, scale=192**-0.5, **tables))
    with use_gpu(gpu):
        for call in calls:
            decode._bind(*call)
    assert len(gpu.keys) == len(calls) and set(gpu.keys) <= set(pack_keys(arch))


def test_a_wheel_has_room_for_all_kernels() -> None:
    """Five architectures on x86_64; docs/getting-started.md has their numbers."""
    counts = {
        name: len(pack_keys(arch)) for name, arch in ARCHS.items() if name not in pack_table.NOT_ON_HOST["x86_64"]
    }
    assert sum(counts.values()) <= pack_table.MAX_KERNELS
    page = (Path(__file__).parents[2] / "docs" / "getting-started.md").read_text(encoding="utf-8")
    assert re.findall(r"\d+", page.partition("kernels of common calls, ")[2].partition(":")[0]) == [
        str(counts["sm_80"]), "80", str(counts["sm_86"]), "86", "89", str(counts["sm_90"]), "90",
        str(counts["sm_120"]), "120",
    ]  # fmt: skip
    assert counts["sm_86"] == counts["sm_89"]


# The wheel


def test_the_wheel_is_a_wheel(tmp_path: Path) -> None:
    wheel = write_wheel(OBJECTS, tmp_path)
    version, tag = cute_flash.__version__, f"py3-none-manylinux_2_28_{platform.machine()}"
    assert wheel.name == f"cute_flash_kernels-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    info = f"cute_flash_kernels-{version}.dist-info"
    assert {name.rpartition("/")[0] for name in files} == {
        "cute_flash_kernels", "cute_flash_kernels/sm_80", "cute_flash_kernels/sm_90a", info
    }  # fmt: skip
    metadata, kind = (message_from_string(files[f"{info}/{name}"].decode()) for name in ("METADATA", "WHEEL"))
    assert (metadata["Name"], metadata["Version"]) == ("cute-flash-kernels", version)
    # The manifest names the DSL's version, and a pin here would stop the update of the DSL.
    assert metadata.get_all("Requires-Dist") == [f"cute-flash=={version}"]
    assert (kind["Root-Is-Purelib"], kind["Tag"]) == ("false", tag)
    rows = {name: (total, size) for name, total, size in csv.reader(files.pop(f"{info}/RECORD").decode().splitlines())}
    assert rows.pop(f"{info}/RECORD") == ("", "")
    assert set(rows) == set(files)
    for name, content in files.items():
        total = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        assert rows[name] == (f"sha256={total}", str(len(content)))


def test_the_manifest_lists_the_objects(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_wheel(OBJECTS, tmp_path)) as archive:
        manifest = json.loads(archive.read("cute_flash_kernels/manifest.json"))
        for target, objects in OBJECTS.items():
            for name, content in objects.items():
                assert archive.read(f"cute_flash_kernels/{target}/{name}.so") == content
                assert manifest["objects"][target][name] == hashlib.sha256(content).hexdigest()
    assert manifest["facts"] == build_facts() and manifest["version"] == cute_flash.__version__


def test_equal_objects_make_an_equal_wheel(tmp_path: Path) -> None:
    shuffled = {target: dict(reversed(objects.items())) for target, objects in reversed(OBJECTS.items())}
    first, second = write_wheel(OBJECTS, tmp_path / "1"), write_wheel(shuffled, tmp_path / "2")
    assert first.read_bytes() == second.read_bytes()


def test_an_interrupted_build_resumes(
    tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(pack_table, "TABLE", TABLE[:1])
    built: list[LaunchKey] = []

    def build(key: LaunchKey) -> tuple[bytes, str]:
        if len(built) == 5:
            raise KeyboardInterrupt
        built.append(key)
        return digest(key).encode(), ".so"

    monkeypatch.setattr(kernels, "compile_object", build)
    argv = ["pack", "--arch", "sm_80", "--out", str(tmp_path / "dist"), "--work", str(tmp_path / "work")]
    assert main(argv) == 130
    assert not (tmp_path / "dist").exists()
    resumed: list[LaunchKey] = []
    monkeypatch.setattr(kernels, "compile_object", lambda key: (resumed.append(key) or digest(key).encode(), ".so"))
    assert main(argv) == 0
    assert [*built, *resumed] == pack_keys(ARCHS["sm_80"])
    (wheel,) = (tmp_path / "dist").iterdir()
    assert f"wrote {wheel}: {len(built) + len(resumed)} kernel(s)" in capsys.readouterr().out
    # The user's cache is left alone.
    assert not fresh_cache.exists()


@pytest.mark.parametrize(("machine", "absent"), [("x86_64", {"sm_121"}), ("aarch64", {"sm_86", "sm_89", "sm_120"})])
def test_the_default_is_the_gpus_that_a_host_cpu_has(
    machine: str, absent: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(pack_table, "pack_keys", lambda arch: chosen.append(arch.name) or [])
    main(["pack", "--out", str(tmp_path / "dist"), "--work", str(tmp_path / "work")])
    assert set(ARCHS) - set(chosen) == absent


def test_pack_refuses_an_unknown_architecture(capsys: pytest.CaptureFixture) -> None:
    assert main(["pack", "--arch", "sm_80,sm_75"]) == 2
    assert "sm_75" in capsys.readouterr().err


def test_a_pack_needs_a_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert linker() is None
    with pytest.raises(ModuleNotFoundError, match="a pack needs a linker"):
        build_pack([], DiskCache(tmp_path), tmp_path, 1)


# The use of a real pack. A process without a GPU loads a kernel, which refuses tensors on the CPU.

USE = """
import json, sys
from cute_flash.jit import kernels
from cute_flash.planning.plan import plan_forward
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import Problem
key = plan_forward(Problem(3, 4, 2, 777, 888, 64), ARCHS["sm_80"]).main
function = kernels.compiled_kernel(key)
try:
    function()
except TypeError as error:
    refused = str(error)
print(json.dumps({
    "imported": sorted({"cutlass", "tvm_ffi", "cute_flash_kernels"} & set(sys.modules)),
    "info": vars(kernels.cache_info()),
    "refused": refused,
    "operands": len(key.operands),
}))
"""


@pytest.mark.compiles
def test_an_installed_pack_is_loaded_without_the_dsl(tmp_path: Path, fresh_cache: Path) -> None:
    key = plan_forward(Problem(1, 2, 2, 100, 100, 64), ARCHS["sm_80"]).main
    wheel = build_pack([key], DiskCache.at(str(tmp_path / "work")), tmp_path, 1)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(pip, check=True)

    def use() -> tuple[dict[str, Any], str]:
        environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{site}"}
        done = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout), done.stderr

    answer, log = use()
    assert answer["info"] == {"compiles": 0, "disk_hits": 0, "pack_hits": 1, "memory_hits": 0} and not log
    assert answer["imported"] == ["tvm_ffi"]
    assert f"Expects {answer['operands']} parameters" in answer["refused"]
    assert DiskCache.default().files() == []
    # A truncated object: the kernel is compiled, and works.
    (shared,) = site.glob("cute_flash_kernels/sm_80/*.so")
    shared.write_bytes(shared.read_bytes()[:-1])
    answer, log = use()
    assert answer["info"]["compiles"] == 1 and "it was truncated or altered" in log and log.count("\n") == 1
    assert f"Expects {answer['operands']} parameters" in answer["refused"]
