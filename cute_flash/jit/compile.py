"""Returns compiled kernels: from memory, from the disk cache, or compiled with `cute.compile`.

An entry on disk is a shared object (`<digest>.so`, or an object file `.o` on a machine without a linker) with a
checksum file. The digest covers the compile key, the sources that generate code, the versions of the DSL and of
TVM-FFI, the DSL's CUDA flavour (cu12, cu13) and the host platform. An entry that is missing, truncated, altered or
owned by another user is a miss. Loading an `.so` does not import cutlass.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cute_flash.errors import InstallationError, NotCompiledError
from cute_flash.jit.describe import describe_key
from cute_flash.jit.disk import SUFFIXES, CacheWarning, DiskCache
from cute_flash.jit.nvtx import marked
from cute_flash.jit.policy import jit_is_on
from cute_flash.jit.workers import precompile_in_processes
from cute_flash.planning.launch import CompileKey, LaunchChain, LaunchKey
from cute_flash.planning.registry import KERNELS

# Files that determine the generated code; jit/compile.py has the compiler's options.
SOURCES = (
    "kernels/**/*.py", "device/**/*.py", "smem/**/*.py", "score_mod/**/*.py", "spec/**/*.py",
    "planning/**/*.py", "jit/compile.py",
)  # fmt: skip
# Packages that compile and load kernels, and their modules.
PACKAGES = {"nvidia-cutlass-dsl": "cutlass", "apache-tvm-ffi": "tvm_ffi"}
SYMBOL = "launch"
LINKERS = ("ld", "cc", "gcc", "clang")

lock = threading.Lock()  # the DSL is a process-wide singleton that compiles one kernel at a time
_functions: dict[LaunchKey, Callable[..., None]] = {}


@dataclass(frozen=True)
class CacheInfo:
    """The numbers of kernels that this process compiled, loaded from disk, and reused from memory."""

    compiles: int = 0
    disk_hits: int = 0
    memory_hits: int = 0


_counts: Counter[str] = Counter()  # by the fields of CacheInfo


def cache_info() -> CacheInfo:
    """The cache statistics of this process."""
    return CacheInfo(**_counts)


def compiled_kernel(key: LaunchKey) -> Callable[..., None]:
    """The function that launches a kernel, or several. Its arguments are `key.parameters`."""
    with lock:
        if key in _functions:
            _counts["memory_hits"] += 1
            return _functions[key]
        cache = DiskCache.default()
        with marked(f"load {key.kernel}"), cache.locked(digest(key)):
            launch, outcome = _load_cached(cache, key), "disk_hits"
            if launch is None:
                if not jit_is_on():
                    state = "the JIT is off (CUTE_FLASH_JIT=0 or use_jit(False))"
                    raise NotCompiledError(f"{describe_key(key)} for {key.target} is not compiled, and {state}")
                with marked(f"compile {key.kernel}"):
                    launch, outcome = _load(cache.store(digest(key), *_compile_object(key))), "compiles"
            _counts[outcome] += 1
        _functions[key] = launch
        return launch


def precompile(key: LaunchKey) -> bool:
    """Compile a kernel, or a chain, into the disk cache, without a GPU; return False if it was there already."""
    cache = DiskCache.default()
    with lock, cache.locked(digest(key)):
        if _is_stored(cache, key):
            return False
        cache.store(digest(key), *_compile_object(key))
        _counts["compiles"] += 1
        return True


def precompile_all(keys: Sequence[LaunchKey], jobs: int) -> Iterator[bool]:
    """Call `precompile` for each key in `jobs` processes; results are in the order of the keys."""
    jobs = min(jobs, len(keys))
    return precompile_in_processes(keys, jobs) if jobs > 1 else map(precompile, keys)


def is_compiled(key: LaunchKey) -> bool:
    """Whether `compiled_kernel` would find the function, in memory or in the disk cache."""
    return key in _functions or _is_stored(DiskCache.default(), key)


def _is_stored(cache: DiskCache, key: LaunchKey) -> bool:
    return any(cache.find(digest(key), suffix) for suffix in SUFFIXES)


def forget() -> None:
    """Drop the kernels in memory, for tests. The disk cache is kept."""
    with lock:
        _functions.clear()


def digest(key: LaunchKey) -> str:
    """The name of a compiled function's entry in the disk cache."""
    facts = {
        "keys": [_described(one) for one in key.keys],
        "sources": source_digest(),
        "toolchain": toolchain(key.target),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]


def _described(key: CompileKey) -> dict[str, Any]:
    described = asdict(key)
    # Fields that only decide which row of the tile table is chosen do not change the kernel.
    described["tile"] = {x.name: described["tile"][x.name] for x in fields(key.tile) if x.compare}
    return described


@lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of the paths and contents of `SOURCES`."""
    root = Path(__file__).parents[1]
    sha256 = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(root.glob(pattern)):
            sha256.update(str(path.relative_to(root.parent)).encode() + b"\0" + path.read_bytes())
    return sha256.hexdigest()


@cache
def toolchain(target: str) -> dict[str, str]:
    """Versions and platform that the machine code depends on, read without importing the DSL."""
    check_installed()
    return {
        "dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
        "flavour": runtime_library().parent.parent.name,
        "host": f"{platform.system()}-{platform.machine()}",
        "target": target,
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


def cute_compile(key: LaunchKey, options: str = "") -> Any:
    """Trace and compile a kernel, or a chain. The caller must hold `lock`."""
    check_installed()
    import cutlass.cute as cute

    from cute_flash.kernels.common.chain import KernelChain
    from cute_flash.kernels.common.fakes import fake_arguments

    kernels = {one: _kernel(one) for one in key.keys}
    function = KernelChain(kernels) if isinstance(key, LaunchChain) else kernels[key]
    arguments = fake_arguments(key)
    return cute.compile(function, **arguments, options=f"--gpu-arch {key.target} --enable-tvm-ffi {options}".strip())


def _kernel(key: CompileKey) -> Any:
    """The object of a kernel's class (`KernelSpec.path`), whose call launches the kernel."""
    module, name = KERNELS[key.kernel].path.split(":")
    return getattr(importlib.import_module(f"cute_flash.kernels.{module}"), name)(key.static, key.tile)


def _load_cached(cache: DiskCache, key: LaunchKey) -> Callable[..., None] | None:
    for suffix in SUFFIXES:
        path = cache.find(digest(key), suffix)
        if path is None:
            continue
        try:
            return _load(path)
        except (OSError, RuntimeError, AttributeError) as error:
            warnings.warn(f"kernel cache: {path} cannot be loaded ({error}); built again", CacheWarning, stacklevel=4)
    return None


def _compile_object(key: LaunchKey) -> tuple[bytes, str]:
    """Compile a kernel, or a chain, to an entry of the disk cache; return (content, suffix)."""
    return export(cute_compile(key))


def export(function: Any) -> tuple[bytes, str]:
    """A compiled kernel as a shared object, or as an object file if there is no linker; return (content, suffix)."""
    with tempfile.TemporaryDirectory(prefix="cute_flash_") as folder:
        object_file = Path(folder, "kernel.o")
        function.export_to_c(str(object_file), function_name=SYMBOL, export_only_tvm_ffi_symbols=True)
        tool = linker()
        if tool is None:
            return object_file.read_bytes(), ".o"
        shared = Path(folder, "kernel.so")
        subprocess.run([tool, "-shared", "-o", shared, object_file], check=True, capture_output=True)
        return shared.read_bytes(), ".so"


def linker() -> str | None:
    """The path of a linker, or of a compiler that calls one; None if there is none."""
    return next(filter(None, map(shutil.which, LINKERS)), None)


def _load(path: Path) -> Callable[..., None]:
    if path.suffix == ".o":
        import cutlass.runtime

        return getattr(cutlass.runtime.load_module(str(path), enable_tvm_ffi=True), SYMBOL)
    import tvm_ffi

    _preload(str(runtime_library()))
    return getattr(tvm_ffi.load_module(str(path)), SYMBOL)


@cache
def _preload(library: str) -> ctypes.CDLL:
    """Load a library into the global namespace, against which the undefined symbols of an entry are resolved."""
    return ctypes.CDLL(library, os.RTLD_GLOBAL | os.RTLD_NOW)
