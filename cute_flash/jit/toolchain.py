"""The packages that compile and load kernels: their versions and the DSL's runtime library. None is imported here."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

from cute_flash.errors import InstallationError

# Packages that compile and load kernels, and their modules.
PACKAGES = {"nvidia-cutlass-dsl": "cutlass", "apache-tvm-ffi": "tvm_ffi"}


@cache
def toolchain() -> dict[str, str]:
    """Versions and platform that the objects of kernels depend on."""
    check_installed()
    return {
        "dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
        "flavour": runtime_library().parent.parent.name,
        "host": f"{platform.system()}-{platform.machine()}",
    }


def check_installed() -> None:
    """Raise `InstallationError` if a package that compiles or loads kernels is missing. None is imported."""
    for package, module in PACKAGES.items():
        if find_spec(module) is None:
            raise _missing(package)


def _missing(package: str) -> InstallationError:
    try:
        required = importlib.metadata.requires("cute-flash") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree
        required = []
    requirement = next((x for x in required if x.startswith(package)), package)
    return InstallationError(f"{package} is not installed: pip install '{requirement}'")


@lru_cache(maxsize=1)
def runtime_library() -> Path:
    """The DSL's runtime library, of the newest installed flavour (cu12, cu13) that the driver supports."""
    spec = find_spec("cutlass")
    if spec is None or spec.origin is None:
        raise _missing("nvidia-cutlass-dsl")
    libraries = sorted(Path(spec.origin).parents[2].glob("cu*/lib/libcute_dsl_runtime.so"))
    major = driver_cuda_version() // 1000
    usable = [path for path in libraries if not major or int(path.parents[1].name.removeprefix("cu")) <= major]
    if not usable:
        raise InstallationError(f"no flavour of nvidia-cutlass-dsl for a CUDA {major} driver; see `cute-flash doctor`")
    return usable[-1]


def driver_cuda_version() -> int:
    """CUDA version of the driver, such as 13000; 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value
