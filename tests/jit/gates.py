"""Compile a kernel once per session, for all tests and workers.

A compilation writes two files to the session's kernel cache: the entry that launches load, and the `Resources` that the
compile gates (`tests/kernels/test_resources.py`) and the cubin lock (`tests.lock`) read.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from cute_flash.jit import compile as compiling
from cute_flash.jit import resources as reading
from cute_flash.jit.digest import digest
from cute_flash.jit.disk import DiskCache
from cute_flash.jit.resources import Resources
from cute_flash.planning.plan import CompileKey

# A cache that is kept between sessions may hold files of an older version of the reader.
SUFFIX = f".{hashlib.sha256(Path(reading.__file__).read_bytes()).hexdigest()[:8]}.resources"


def kernel_resources(key: CompileKey) -> Resources:
    """The resources of a kernel; compiles it if no other test did."""
    cache, name = DiskCache.default(), digest(key)
    with cache.locked(name):
        path = cache.find(name, SUFFIX)
        if path is None:
            found, entry = _compile(key)
            cache.store(name, *entry)
            path = cache.store(name, pickle.dumps(found), SUFFIX)
        return pickle.loads(path.read_bytes())


def _compile(key: CompileKey) -> tuple[Resources, tuple[bytes, str]]:
    """The resources of a kernel and its entry of the cache, from one compilation."""
    functions: list[Any] = []
    cute_compile = compiling.cute_compile

    def compile_once(key: CompileKey, options: str = "") -> Any:
        if not functions:
            functions.append(cute_compile(key, options))
        return functions[0]

    with mock.patch.object(compiling, "cute_compile", compile_once), without_locations():
        return reading.kernel_resources(key), compiling.compile_object(key)


@contextmanager
def without_locations() -> Iterator[None]:
    """Do not look up the source line of every operation.

    The DSL does so when ptxas is asked for remarks. It takes a third of the time, and no test reads the lines. The
    machine code is the same.
    """
    from cutlass.base_dsl import dsl

    track = getattr(dsl, "_set_enable_frame_filtering", None)
    if track is None:
        yield
        return
    with mock.patch.object(dsl, "_set_enable_frame_filtering", lambda _: track(False)):
        yield
