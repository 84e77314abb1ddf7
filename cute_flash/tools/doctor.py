"""`cute-flash doctor`: check the installation, and name a remedy for each problem."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cute_flash.errors import InstallationError, UnsupportedError
from cute_flash.jit import compile as compiling
from cute_flash.jit import resources, toolchain
from cute_flash.jit.disk import DiskCache
from cute_flash.jit.pack import installed_pack
from cute_flash.spec import arch
from cute_flash.spec.family import check_family

OK, NOTE, BROKEN = "ok", "note", "broken"
# Modules whose import shows that a requirement works, where they are not named like the package.
MODULES = {"nvidia-cutlass-dsl": "cutlass.cute", "apache-tvm-ffi": "tvm_ffi", "cuda-bindings": "cuda.bindings.driver"}
# Flavours of the DSL (its builds for CUDA 12 and 13): CUDA version and release of the oldest driver that supports each.
FLAVOURS = {"cu12": (12090, "575.51"), "cu13": (13000, "580.65")}
# Environment variables, and functions that raise `UnsupportedError` for a wrong value.
VARIABLES: dict[str, Callable[[str], object]] = {
    "CUTE_FLASH_ARCH": arch.by_name,
    "CUTE_FLASH_CACHE_DIR": str,
    "CUTE_FLASH_CHECK": str,
    "CUTE_FLASH_KERNELS": check_family,
    "CUTE_FLASH_NVTX": str,
}
CUDA_NO_DEVICE = 100
PYTORCH_PAGE = "https://pytorch.org/get-started/locally"


@dataclass(frozen=True)
class Check:
    name: str
    status: str
    detail: str
    remedy: str = ""


def examine() -> list[Check]:
    """Run all checks. Nothing is compiled or launched."""
    return [
        *_packages(),
        _flavours(),
        _driver(),
        _cuda_versions(),
        *_gpus(),
        *_programs(),
        _cache(),
        _pack(),
        *_environment(),
    ]


def is_sound(checks: list[Check]) -> bool:
    return all(check.status != BROKEN for check in checks)


def has_supported_gpu(checks: list[Check]) -> bool:
    return any(check.name.startswith("GPU ") and check.status == OK for check in checks)


def verdict(checks: list[Check]) -> str:
    if not is_sound(checks):
        return f"broken: {', '.join(check.name for check in checks if check.status == BROKEN)}"
    if has_supported_gpu(checks):
        return "sound: attention runs on the GPU"
    return "sound: attention runs, on the CPU only"


def lines(checks: list[Check]) -> list[str]:
    name_width = max(len(check.name) for check in checks)
    texts = []
    for check in checks:
        texts.append(f"{check.status:<7} {check.name:<{name_width}}  {check.detail}")
        if check.remedy:
            texts.append(f"{'':<7} {'':<{name_width}}  -> {check.remedy}")
    return [*texts, "", verdict(checks)]


def as_dict(checks: list[Check]) -> dict[str, Any]:
    return {
        "ok": is_sound(checks),
        "path": "gpu" if has_supported_gpu(checks) else "cpu",
        "verdict": verdict(checks),
        "checks": [asdict(check) for check in checks],
    }


def satisfies(version: str, required: str | SpecifierSet) -> bool:
    """Whether a version such as "4.8.1+cpu" is in a range such as ">=4.8,<4.9".

    Only the release numbers are compared: "4.9.0rc1" is 4.9.0.
    """
    return Version(version).base_version in SpecifierSet(str(required))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Check]:
    """Python, and the packages that the metadata of cute-flash requires."""
    detail = f"{platform.python_version()} on {sys.platform}"
    try:
        metadata = importlib.metadata.distribution("cute-flash")
    except importlib.metadata.PackageNotFoundError:
        yield Check("Python", NOTE, f"{detail}; cute-flash runs from its source tree", "pip install -e .")
        return
    required = metadata.metadata["Requires-Python"]
    if sys.platform != "linux":
        yield Check("Python", BROKEN, detail, "use Linux or WSL: kernels are built for Linux only")
    elif not satisfies("{}.{}.{}".format(*sys.version_info), required):
        yield Check("Python", BROKEN, detail, f"use a Python {required}")
    else:
        yield Check("Python", OK, detail)
    # Requirements with a marker belong to an extra.
    yield from (_package(x) for x in map(Requirement, metadata.requires or []) if x.marker is None)


def _package(requirement: Requirement) -> Check:
    name, version = requirement.name, _version(requirement.name)
    remedy = f"pip install '{requirement}'"
    if version is None:
        return Check(name, BROKEN, "not installed", remedy)
    if not satisfies(version, requirement.specifier):
        return Check(name, BROKEN, f"{version}, supported are {requirement.specifier}", remedy)
    try:
        importlib.import_module(MODULES.get(name, name))
    # A broken native library can raise anything.
    except Exception as error:
        return Check(name, BROKEN, f"{version}, but {type(error).__name__}: {error}", f"{remedy} --force-reinstall")
    if name == "torch":
        version += f", built for CUDA {torch.version.cuda}" if torch.version.cuda else ", CPU build"
    return Check(name, OK, version)


def _flavours() -> Check:
    """The installed flavours of the DSL (cu12, cu13): one must match the driver."""
    dsl = _version("nvidia-cutlass-dsl")
    installed = {name: _version(f"nvidia-cutlass-dsl-libs-{name}") for name in FLAVOURS}
    detail = ", ".join(f"{name} {version}" for name, version in installed.items() if version) or "none"
    if any(version not in (None, dsl) for version in installed.values()):
        remedy = f"pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]=={dsl}'"
        return Check("DSL flavours", BROKEN, f"{detail}, but the DSL is {dsl}", remedy)
    try:
        chosen = toolchain.runtime_library().parents[1].name
    except ModuleNotFoundError as error:
        return Check("DSL flavours", BROKEN, f"{detail}: {error}", _install_flavours())
    if toolchain.driver_cuda_version() >= FLAVOURS["cu13"][0] and chosen == "cu12":
        return Check("DSL flavours", NOTE, f"{detail}; the driver supports cu13 too", _install_flavours())
    return Check("DSL flavours", OK, f"{detail}; {chosen} is used")


def _install_flavours() -> str:
    dsl = _version("nvidia-cutlass-dsl")
    return f"pip install 'nvidia-cutlass-dsl[cu13]{f'=={dsl}' if dsl else ''}' installs both cu12 and cu13"


def _cuda_versions() -> Check:
    """Whether the driver supports torch's CUDA version, and the DSL has the flavour of that version."""
    name, driver, flavours = "CUDA versions", toolchain.driver_cuda_version(), _installed_flavours()
    driver_text = f"driver {_cuda_text(driver)}" if driver else "no driver"
    detail = f"{driver_text}, torch {torch.version.cuda or 'for the CPU'}, DSL {' and '.join(flavours) or 'none'}"
    if torch.version.cuda is None:
        return Check(name, OK, detail)
    major = int(torch.version.cuda.partition(".")[0])
    if driver and major > driver // 1000:
        _, release = FLAVOURS.get(f"cu{major}", (0, f"for CUDA {major}"))
        remedy = f"install driver {release} or newer, or a torch for CUDA {driver // 1000}: {PYTORCH_PAGE}"
        return Check(name, BROKEN, f"{detail}: the driver is too old for this torch", remedy)
    if f"cu{major}" not in flavours:
        if f"cu{major}" in FLAVOURS:
            return Check(name, BROKEN, f"{detail}: the DSL lacks cu{major}", _install_flavours())
        remedy = f"install a torch for CUDA {' or '.join(x.removeprefix('cu') for x in FLAVOURS)}: {PYTORCH_PAGE}"
        return Check(name, NOTE, f"{detail}: the DSL has no cu{major}", remedy)
    return Check(name, OK, detail)


def _installed_flavours() -> list[str]:
    return [name for name in FLAVOURS if _version(f"nvidia-cutlass-dsl-libs-{name}")]


def _cuda_text(version: int) -> str:
    """13020 as "13.2"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _driver() -> Check:
    version = toolchain.driver_cuda_version()
    if not version:
        remedy = "on a machine with a GPU: install its driver"
        return Check("driver", NOTE, "no NVIDIA driver: attention runs on the CPU", remedy)
    detail = f"{_driver_release()}CUDA {_cuda_text(version)}"
    least, release = FLAVOURS["cu12"]
    if version < least:
        return Check("driver", BROKEN, f"{detail} is too old", f"install driver {release} or newer")
    code, _ = _visible_to_driver()
    if code not in (0, CUDA_NO_DEVICE):
        remedy = "check that nvidia-smi works; reboot after a driver update"
        return Check("driver", BROKEN, f"{detail}, cuInit fails with error {code}", remedy)
    return Check("driver", OK, detail)


def _driver_release() -> str:
    """The release of the driver, such as "575.57.08, "; empty if /proc does not have it."""
    try:
        match = re.search(r"\s(\d{3,}\.[\d.]+)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return f"{match[1]}, " if match else ""


def _visible_to_driver() -> tuple[int, int]:
    """The result of cuInit, and the number of GPUs that CUDA_VISIBLE_DEVICES allows."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return CUDA_NO_DEVICE, 0
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return code, count.value


def _gpus() -> Iterator[Check]:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _gpu(index)
        return
    _, visible = _visible_to_driver()
    if not visible:
        remedy = "start a container with --gpus all; check CUDA_VISIBLE_DEVICES"
        yield Check("GPUs", NOTE, "none: attention runs on the CPU", remedy)
    elif torch.version.cuda is None:
        detail = f"the driver sees {visible}, but this torch is a CPU build"
        yield Check("GPUs", BROKEN, detail, f"install a CUDA build of torch: {PYTORCH_PAGE}")
    else:
        detail = f"the driver sees {visible}, but torch, built for CUDA {torch.version.cuda}, cannot use them"
        yield Check("GPUs", BROKEN, detail, f"update the driver, or install a torch for it: {PYTORCH_PAGE}")


def _gpu(index: int) -> Check:
    try:
        spec = arch.detect(index)
    except UnsupportedError as error:
        return Check(f"GPU {index}", NOTE, str(error), f"kernels run on {', '.join(arch.ARCHS)}")
    detail = f"{spec.gpu}, {spec.name}, {spec.num_sms} SMs"
    if spec.was_run:
        return Check(f"GPU {index}", OK, detail)
    remedy = "run `cute-flash selftest`: kernels are compiled for this architecture, but have not been run on it"
    return Check(f"GPU {index}", OK, detail, remedy)


def _programs() -> Iterator[Check]:
    """Programs that are useful, but not necessary."""
    linkers = f"none of {', '.join(compiling.LINKERS)} on the path"
    without_linker = "apt install binutils (or the like); without it cached kernels load a second or two slower"
    without_nvdisasm = "pip install nvidia-cuda-nvdisasm; only `inspect` needs it, to count instructions"
    for name, path, problem, remedy in (
        ("linker", compiling.linker(), linkers, without_linker),
        ("nvdisasm", resources.nvdisasm(), "not found", without_nvdisasm),
    ):
        yield Check(name, NOTE, problem, remedy) if path is None else Check(name, OK, path)


def _cache() -> Check:
    """The kernel cache; `DiskCache.default` warns about problems of the folder."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = DiskCache.default()
    if cache.is_persistent:
        return Check("kernel cache", OK, f"{cache.folder}, private, {cache.contents()}")
    detail = "; ".join(str(warning.message) for warning in caught) or "the folder cannot be used"
    remedy = "make it private (chmod go-w), or name another in CUTE_FLASH_CACHE_DIR; without it, every process compiles"
    return Check("kernel cache", BROKEN, detail, remedy)


def _pack() -> Check:
    """The installed pack of kernels, and whether it is used."""
    name, pack = "kernel pack", installed_pack()
    if pack is None:
        return Check(name, OK, "none is used; `cute-flash pack` builds one")
    try:
        difference = pack.difference
    except InstallationError as error:
        return Check(name, NOTE, f"{pack.name}, but {error}", "see above")
    if difference:
        remedy = "install a pack of these versions, or build one with `cute-flash pack`"
        return Check(name, NOTE, f"{pack.name} is not used: it was built with {difference}", remedy)
    return Check(name, OK, f"{pack.name}, {pack.contents()}")


def _environment() -> Iterator[Check]:
    for name in sorted(name for name in os.environ if name.startswith("CUTE_FLASH_")):
        value = os.environ[name]
        if name not in VARIABLES:
            yield Check(name, NOTE, f"{value!r} has no effect", f"known variables are {', '.join(VARIABLES)}")
            continue
        try:
            if value:
                VARIABLES[name](value)
            yield Check(name, OK, repr(value))
        except UnsupportedError as error:
            yield Check(name, BROKEN, str(error), "correct or unset it")
