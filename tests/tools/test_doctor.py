"""`cute-flash doctor`: each fault is found, named and given a remedy, and decides the exit status."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from cute_flash.errors import UnsupportedError
from cute_flash.jit import toolchain
from cute_flash.jit.digest import build_facts
from cute_flash.jit.pack import Manifest, Pack
from cute_flash.spec import arch
from cute_flash.tools import doctor
from cute_flash.tools.cli import main

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def checks_by_name() -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.examine()}


def test_doctor_lists_all_parts(fresh_cache: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in found["checks"]]
    packages = {"torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings", "nvtx"}
    assert {"Python", "DSL flavours", "driver", "CUDA versions", "linker", "nvdisasm"} | packages < set(names)
    assert {"kernel cache", "kernel pack", "CUTE_FLASH_CACHE_DIR"} < set(names)
    assert found["ok"] and found["path"] == ("gpu" if torch.cuda.is_available() else "cpu")
    assert all(check["remedy"] for check in found["checks"] if check["status"] != "ok")


@needs_no_gpu
def test_doctor_without_gpu_is_sound_and_says_so(fresh_cache: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("sound: attention runs, on the CPU only\n")
    assert "no NVIDIA driver" in out and "-> on a machine with a GPU: install its driver" in out


def test_doctor_finds_a_cache_that_others_can_write(fresh_cache: Path, capsys: pytest.CaptureFixture) -> None:
    fresh_cache.mkdir()
    fresh_cache.chmod(0o777)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "writable by others (mode 777; chmod go-w it)" in out
    assert out.endswith("broken: kernel cache\n")


def test_doctor_describes_the_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_pack", lambda: None)
    assert doctor._pack().status == doctor.OK and "none is used" in doctor._pack().detail
    objects = {"sm_80": {"a": "", "b": ""}, "sm_90a": {"c": ""}}
    manifest = Manifest("1.2", build_facts(), objects)
    monkeypatch.setattr(doctor, "installed_pack", lambda: Pack(Path(), manifest))
    assert doctor._pack().status == doctor.OK
    assert doctor._pack().detail == "cute-flash-kernels 1.2, 3 kernel(s) for sm_80, sm_90a"
    other = replace(manifest, facts={**build_facts(), "dsl": "4.7.0"})
    monkeypatch.setattr(doctor, "installed_pack", lambda: Pack(Path(), other))
    assert doctor._pack().status == doctor.NOTE
    assert "is not used: it was built with nvidia-cutlass-dsl 4.7.0 instead of" in doctor._pack().detail
    assert "cute-flash pack" in doctor._pack().remedy


def test_doctor_misses_the_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = next(doctor._programs())
    assert check.status == doctor.NOTE and "binutils" in check.remedy
    (tmp_path / "gcc").touch(mode=0o755)
    assert next(doctor._programs()) == doctor.Check("linker", doctor.OK, str(tmp_path / "gcc"))


def test_doctor_finds_old_and_missing_packages(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"nvidia-cutlass-dsl": "4.9.0", "nvtx": None}
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, known(name)))
    found = checks_by_name()
    assert found["nvidia-cutlass-dsl"].status == found["nvtx"].status == doctor.BROKEN
    assert "4.9.0, supported are" in found["nvidia-cutlass-dsl"].detail
    assert "pip install 'nvidia-cutlass-dsl" in found["nvidia-cutlass-dsl"].remedy
    assert found["nvtx"].detail == "not installed"
    # Compiled parts of another version are installed.
    assert found["DSL flavours"].status == doctor.BROKEN


def test_doctor_finds_packages_that_do_not_import(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.MODULES, "cuda-bindings", "cuda_bindings_that_is_not_there")
    check = checks_by_name()["cuda-bindings"]
    assert check.status == doctor.BROKEN and "ModuleNotFoundError" in check.detail
    assert "--force-reinstall" in check.remedy


@pytest.mark.parametrize(
    ("driver", "flavour", "driver_status", "flavour_status"),
    [
        (12080, "cu12", doctor.BROKEN, doctor.OK),
        (12090, "cu12", doctor.OK, doctor.OK),
        (13000, "cu13", doctor.OK, doctor.OK),
        (13000, "cu12", doctor.OK, doctor.NOTE),
    ],
)
def test_doctor_compares_driver_and_flavour(
    driver: int, flavour: str, driver_status: str, flavour_status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: driver)
    monkeypatch.setattr(toolchain, "runtime_library", lambda: Path(flavour, "lib", "libcute_dsl_runtime.so"))
    monkeypatch.setattr(doctor, "_visible_to_driver", lambda: (0, 1))
    found = {check.name: check for check in [doctor._driver(), doctor._flavours()]}
    assert (found["driver"].status, found["DSL flavours"].status) == (driver_status, flavour_status)
    assert ("575.51" in found["driver"].remedy) == (driver_status == doctor.BROKEN)


@pytest.mark.parametrize(
    ("driver", "cuda", "flavours", "status", "remedy"),
    [
        (13000, "13.0", ("cu12", "cu13"), doctor.OK, ""),
        # Minor versions of one major version are compatible.
        (13000, "13.2", ("cu12", "cu13"), doctor.OK, ""),
        # Newer drivers support older CUDA versions.
        (13020, "12.8", ("cu12", "cu13"), doctor.OK, ""),
        (12090, "12.9", ("cu12",), doctor.OK, ""),
        (12090, None, ("cu12", "cu13"), doctor.OK, ""),
        (0, "13.2", ("cu12", "cu13"), doctor.OK, ""),
        # A plain installation of earlier versions had one flavour only.
        (13020, "13.2", ("cu12",), doctor.BROKEN, "pip install 'nvidia-cutlass-dsl[cu13]=="),
        (0, "13.2", ("cu12",), doctor.BROKEN, "pip install 'nvidia-cutlass-dsl[cu13]=="),
        (12090, "13.2", ("cu12", "cu13"), doctor.BROKEN, "install driver 580.65 or newer, or a torch for CUDA 12"),
        (12090, "14.0", ("cu12", "cu13"), doctor.BROKEN, "install driver for CUDA 14 or newer, or a torch for CUDA 12"),
        (14000, "14.0", ("cu12", "cu13"), doctor.NOTE, "install a torch for CUDA 12 or 13"),
    ],
)
def test_doctor_compares_driver_torch_and_flavours(
    driver: int, cuda: str | None, flavours: tuple[str, ...], status: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {f"nvidia-cutlass-dsl-libs-{name}": "4.8.1" if name in flavours else None for name in doctor.FLAVOURS}
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions[name] if name in versions else known(name))
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    check = doctor._cuda_versions()
    assert check.status == status, check
    assert remedy in check.remedy and bool(check.remedy) == (status != doctor.OK)
    assert (cuda or "for the CPU") in check.detail and all(name in check.detail for name in flavours)


def test_the_requirements_have_both_flavours() -> None:
    """`pip install` without an extra installs the CuTe DSL for CUDA 12 and for CUDA 13."""
    page = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (requirement,) = re.findall(r'"(nvidia-cutlass-dsl\S*)"', page)
    assert Requirement(requirement).extras == {"cu13"}


@needs_no_gpu
@pytest.mark.parametrize(("visible", "cuda", "status"), [(0, None, "note"), (2, None, "broken"), (2, "13.0", "broken")])
def test_doctor_finds_a_torch_that_does_not_fit_the_machine(
    visible: int, cuda: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_visible_to_driver", lambda: (0, visible))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (check,) = doctor._gpus()
    assert check.status == status and check.remedy
    assert ("CPU build" in check.detail) == (visible == 2 and cuda is None)


def test_doctor_tells_supported_gpus_from_others(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def detect(index: int) -> arch.ArchSpec:
        if index == 0:
            raise UnsupportedError("GPU 0 (Tesla T4) is sm_75")
        return arch.SM_90

    monkeypatch.setattr(arch, "detect", detect)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    old, new = doctor._gpus()
    assert (old.status, new.status) == (doctor.NOTE, doctor.OK)
    assert not doctor.has_supported_gpu([old]) and doctor.has_supported_gpu([old, new])
    assert doctor.verdict([old, new]) == "sound: attention runs on the GPU"


def test_doctor_names_the_self_test_where_kernels_have_not_been_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arch, "detect", lambda index: (arch.SM_90, arch.SM_120)[index])
    run, not_run = map(doctor._gpu, (0, 1))
    assert run.status == not_run.status == doctor.OK and not run.remedy
    assert "sm_120" in not_run.detail and "cute-flash selftest" in not_run.remedy
    assert "-> run `cute-flash selftest`" in "\n".join(doctor.lines([not_run]))


def test_doctor_reads_the_environment(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ARCH": "sm_12", "KERNELS": "sm80", "CACHE": "/tmp"}.items():
        monkeypatch.setenv(f"CUTE_FLASH_{name}", value)
    found = checks_by_name()
    assert found["CUTE_FLASH_ARCH"].status == doctor.BROKEN and "sm_80" in found["CUTE_FLASH_ARCH"].detail
    assert found["CUTE_FLASH_KERNELS"].status == doctor.OK
    assert found["CUTE_FLASH_CACHE"].status == doctor.NOTE
    assert "CUTE_FLASH_CACHE_DIR" in found["CUTE_FLASH_CACHE"].remedy


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("4.8", ">=4.8,<4.9", True),
        ("4.8.1+cpu", "<4.9,>=4.8", True),
        ("4.9.0", ">=4.8,<4.9", False),
        ("4.10", ">=4.9", True),
        ("0.1.15.post1", ">=0.1.11,<0.2", True),
        ("13", ">=13.0.0", True),
        ("2.8.0", "", True),
    ],
)
def test_version_ranges(version: str, wanted: str, expected: bool) -> None:
    assert doctor.satisfies(version, wanted) is expected
