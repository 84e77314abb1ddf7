"""Returns compiled kernels: from memory, from the user's disk cache, from the installed pack, or compiled now.

An object on disk is a shared object (`<digest>.so`, or an object file `.o` on a machine without a linker). One that is
missing, truncated or altered is a miss, and so is an entry of the cache that is owned by another user. Loading an `.so`
does not import cutlass.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from cute_flash.errors import NotCompiledError
from cute_flash.jit import pack
from cute_flash.jit.compile import SYMBOL, compile_object, lock
from cute_flash.jit.describe import describe_key
from cute_flash.jit.digest import digest
from cute_flash.jit.disk import SUFFIXES, CacheWarning, DiskCache
from cute_flash.jit.nvtx import marked
from cute_flash.jit.policy import jit_is_on
from cute_flash.jit.toolchain import runtime_library
from cute_flash.planning.launch import LaunchKey

_functions: dict[LaunchKey, Callable[..., None]] = {}


@dataclass(frozen=True)
class CacheInfo:
    """The numbers of kernels that this process compiled, loaded from disk and from the pack, and reused from memory."""

    compiles: int = 0
    disk_hits: int = 0
    pack_hits: int = 0
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
                launch, outcome = _load_from_pack(key), "pack_hits"
            if launch is None:
                if not jit_is_on():
                    state = "the JIT is off (CUTE_FLASH_JIT=0 or use_jit(False))"
                    raise NotCompiledError(f"{describe_key(key)} for {key.target} is not compiled, and {state}")
                with marked(f"compile {key.kernel}"):
                    launch, outcome = load_object(cache.store(digest(key), *compile_object(key))), "compiles"
            _counts[outcome] += 1
        _functions[key] = launch
        return launch


def precompile(key: LaunchKey, cache: DiskCache | None = None) -> bool:
    """Compile a kernel, or a chain, into the disk cache, without a GPU; return False if it is there or in the pack.

    `cache`: another folder, into which a kernel of the pack is compiled too.
    """
    folder = cache or DiskCache.default()
    with lock, folder.locked(digest(key)):
        if _is_stored(folder, key) or (cache is None and _is_in_pack(key)):
            return False
        folder.store(digest(key), *compile_object(key))
        _counts["compiles"] += 1
        return True


def precompile_all(keys: Sequence[LaunchKey], jobs: int, cache: DiskCache | None = None) -> Iterator[bool]:
    """Call `precompile` for each key in `jobs` processes; results are in the order of the keys."""
    jobs = min(jobs, len(keys))
    if jobs <= 1:
        return map(partial(precompile, cache=cache), keys)
    # Imported here, because the first call of a process does not need it.
    from cute_flash.jit.workers import precompile_in_processes

    return precompile_in_processes(keys, jobs, cache)


def place_of(key: LaunchKey) -> str:
    """Where `compiled_kernel` would find the function: in "memory", on "disk", in the "pack", or nowhere ("")."""
    if key in _functions:
        return "memory"
    return "disk" if _is_stored(DiskCache.default(), key) else "pack" if _is_in_pack(key) else ""


def _is_stored(cache: DiskCache, key: LaunchKey) -> bool:
    return any(cache.find(digest(key), suffix) for suffix in SUFFIXES)


def _is_in_pack(key: LaunchKey) -> bool:
    return pack.find(key.target, digest(key)) is not None


def forget() -> None:
    """Drop the kernels in memory, for tests. The disk cache is kept."""
    with lock:
        _functions.clear()


def _load_cached(cache: DiskCache, key: LaunchKey) -> Callable[..., None] | None:
    for suffix in SUFFIXES:
        path = cache.find(digest(key), suffix)
        if path is None:
            continue
        try:
            return load_object(path)
        except (OSError, RuntimeError, AttributeError) as error:
            warnings.warn(f"kernel cache: {path} cannot be loaded ({error}); built again", CacheWarning, stacklevel=4)
    return None


def _load_from_pack(key: LaunchKey) -> Callable[..., None] | None:
    path = pack.find(key.target, digest(key))
    if path is None:
        return None
    try:
        return load_object(path)
    except (OSError, RuntimeError, AttributeError) as error:
        pack.logger.warning("%s cannot be loaded (%s); it is compiled instead", path, error)
        return None


def load_object(path: Path) -> Callable[..., None]:
    """The function of an object that `jit.compile.export` made."""
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
