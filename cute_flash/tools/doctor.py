"""`cute-flash doctor`: check the installation, and name a remedy for each problem."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import operator
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cute_flash.errors import UnsupportedError
from cute_flash.spec import arch
from cute_flash.spec.family import check_family

OK, NOTE, BROKEN = "ok", "note", "broken"
# Modules whose import shows that a requirement works.
MODULES = {
    "torch": "torch",
    "nvidia-cutlass-dsl": "cutlass.cute",
    "apache-tvm-ffi": "tvm_ffi",
    "cuda-bindings": "cuda.bindings.driver",
    "nvtx": "nvtx",
}
# Flavours of the DSL: the CUDA version and the release of the oldest driver that supports each.
FLAVOURS = {"cu12": (12090, "575.51"), "cu13": (13000, "580.65")}
VARIABLES = ("CUTE_FLASH_ARCH", "CUTE_FLASH_CACHE_DIR", "CUTE_FLASH_KERNELS", "CUTE_FLASH_NVTX")
COMPARISONS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "<": operator.lt, ">": operator.gt}
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
        _python(),
        *_requirements(),
        *_flavours(),
        _driver(),
        *_gpus(),
        _linker(),
        _nvdisasm(),
        _cache(),
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


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version such as "4.8.1+cpu" is in a range such as ">=4.8,<4.9".

    Only the release numbers are compared: "4.9.0rc1" is 4.9.0.
    """
    clauses = re.findall(r"([<>=]=?)\s*([\d.]+)", wanted)
    return all(COMPARISONS[sign](_compared(version, limit), 0) for sign, limit in clauses)


def _compared(a: str, b: str) -> int:
    """-1, 0 or 1 as a < b, a == b or a > b; missing numbers are 0."""
    for x, y in zip_longest(_release(a), _release(b), fillvalue=0):
        if x != y:
            return 1 if x > y else -1
    return 0


def _release(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in match[0].split(".")] if match else []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Check:
    detail = f"{sys.version.split()[0]} on {sys.platform}"
    try:
        required = importlib.metadata.metadata("cute-flash")["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        return Check("Python", NOTE, f"{detail}; cute-flash runs from its source tree", "pip install -e .")
    if sys.platform != "linux":
        return Check("Python", BROKEN, detail, "use Linux (or WSL): the kernels are built for nothing else")
    if not satisfies(detail, required):
        return Check("Python", BROKEN, detail, f"use a Python {required}")
    return Check("Python", OK, detail)


def _requirements() -> Iterator[Check]:
    """The packages that the metadata of cute-flash requires."""
    try:
        required = importlib.metadata.requires("cute-flash") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in required:
        match = re.fullmatch(r"([\w.-]+)\s*([^;]*)", requirement)
        # Requirements with a condition belong to an extra.
        if match:
            yield _requirement(match[1], match[2].strip())


def _requirement(package: str, required: str) -> Check:
    version = _version(package)
    remedy = f"pip install '{package}{required}'"
    if version is None:
        return Check(package, BROKEN, "not installed", remedy)
    if not satisfies(version, required):
        return Check(package, BROKEN, f"{version}, tested are {required}", remedy)
    try:
        module = importlib.import_module(MODULES.get(package, package))
    # A broken native library can raise anything.
    except Exception as error:
        detail = f"{version}, but {type(error).__name__}: {error}"
        return Check(package, BROKEN, detail, f"{remedy} --force-reinstall")
    build = ""
    if package == "torch":
        build = f", built for CUDA {module.version.cuda}" if module.version.cuda else ", CPU build"
    return Check(package, OK, f"{version}{build}")


def _flavours() -> Iterator[Check]:
    """The installed flavours of the DSL (cu12, cu13): one must match the driver."""
    from cute_flash.jit.compile import driver_cuda_version, runtime_library

    dsl, driver = _version("nvidia-cutlass-dsl"), driver_cuda_version()
    installed = {name: _version(f"nvidia-cutlass-dsl-libs-{name}") for name in FLAVOURS}
    detail = ", ".join(f"{name} {version}" for name, version in installed.items() if version) or "none"
    stale = [name for name, version in installed.items() if version not in (None, dsl)]
    if stale:
        remedy = f"pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]=={dsl}'"
        yield Check("DSL flavours", BROKEN, f"{detail}, but the DSL is {dsl}", remedy)
        return
    try:
        chosen = runtime_library().parents[1].name
    except ModuleNotFoundError as error:
        yield Check("DSL flavours", BROKEN, f"{detail}: {error}", "pip install 'cute-flash[cu13]' brings both")
        return
    if driver >= FLAVOURS["cu13"][0] and chosen == "cu12":
        remedy = "pip install 'cute-flash[cu13]'"
        yield Check("DSL flavours", NOTE, f"{detail}; the driver serves cu13 too", remedy)
    else:
        yield Check("DSL flavours", OK, f"{detail}; {chosen} is used")


def _driver() -> Check:
    from cute_flash.jit.compile import driver_cuda_version

    version = driver_cuda_version()
    if not version:
        remedy = "on a machine with a GPU: install its driver"
        return Check("driver", NOTE, "no NVIDIA driver: attention runs on the CPU", remedy)
    detail = f"{_driver_release()}CUDA {version // 1000}.{version % 1000 // 10}"
    least, release = FLAVOURS["cu12"]
    if version < least:
        return Check("driver", BROKEN, f"{detail} is too old", f"install driver {release} or newer")
    code, _ = _visible_to_driver()
    if code not in (0, CUDA_NO_DEVICE):
        remedy = "see whether nvidia-smi works; after an update of the driver, reboot"
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
    try:
        import torch
    # `_requirements` reports it.
    except Exception:
        return
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _gpu(index)
        return
    _, visible = _visible_to_driver()
    if not visible:
        remedy = "in a container: start it with --gpus all; see CUDA_VISIBLE_DEVICES"
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
    return Check(f"GPU {index}", OK, f"{spec.gpu}, {spec.name}, {spec.num_sms} SMs")


def _linker() -> Check:
    from cute_flash.jit.compile import LINKERS, linker

    path = linker()
    if path is None:
        remedy = "apt install binutils (or the like); without it cached kernels load a second or two slower"
        return Check("linker", NOTE, f"none of {', '.join(LINKERS)} on the path", remedy)
    return Check("linker", OK, path)


def _nvdisasm() -> Check:
    from cute_flash.jit.resources import nvdisasm

    path = nvdisasm()
    if path is None:
        remedy = "pip install nvidia-cuda-nvdisasm; only `inspect` needs it, to count instructions"
        return Check("nvdisasm", NOTE, "not found", remedy)
    return Check("nvdisasm", OK, path)


def _cache() -> Check:
    """The kernel cache; `DiskCache.default` warns about problems of the folder."""
    from cute_flash.jit.disk import DiskCache

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = DiskCache.default()
    if not cache.is_persistent:
        detail = "; ".join(str(warning.message) for warning in caught) or "the folder cannot be used"
        remedy = "make it private (chmod go-w), or name another in CUTE_FLASH_CACHE_DIR; else every process compiles"
        return Check("kernel cache", BROKEN, detail, remedy)
    entries = cache.files()
    size = sum(path.stat().st_size for path in entries)
    detail = f"{cache.folder}, private, {len(entries)} kernel(s), {size / 1e6:.1f} MB"
    return Check("kernel cache", OK, detail)


def _environment() -> Iterator[Check]:
    for name in sorted(name for name in os.environ if name.startswith("CUTE_FLASH_")):
        value = os.environ[name]
        if name not in VARIABLES:
            yield Check(name, NOTE, f"{value!r} has no effect", f"there are {', '.join(VARIABLES)}")
            continue
        error = _variable_error(name, value) if value else ""
        yield Check(name, BROKEN, error, "correct or unset it") if error else Check(name, OK, repr(value))


def _variable_error(name: str, value: str) -> str:
    """The error that the variable causes; empty if it is valid."""
    try:
        if name == "CUTE_FLASH_ARCH":
            arch.by_name(value)
        elif name == "CUTE_FLASH_KERNELS":
            check_family(value)
    except UnsupportedError as error:
        return str(error)
    return ""
