"""What compile gates read of kernels: each is compiled once in a session, whichever test or worker asks."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from cute_flash.jit import resources as reading
from cute_flash.jit.compile import digest
from cute_flash.jit.disk import DiskCache
from cute_flash.jit.resources import Resources
from cute_flash.planning.plan import CompileKey

# Beside the kernels of the session; kept for longer, it is of the code that read it.
SUFFIX = f".{hashlib.sha256(Path(reading.__file__).read_bytes()).hexdigest()[:8]}.resources"


def kernel_resources(key: CompileKey) -> Resources:
    cache, name = DiskCache.default(), digest(key)
    with cache.locked(name):
        path = cache.find(name, SUFFIX)
        if path is None:
            with without_locations():
                found = reading.kernel_resources(key)
            path = cache.store(name, pickle.dumps(found), SUFFIX)
        return pickle.loads(path.read_bytes())


@contextmanager
def without_locations() -> Iterator[None]:
    """Asked for notes of ptxas, the DSL looks up the line of source of every operation: a third of the time,
    for what no gate reads. The machine code is the same.
    """
    from cutlass.base_dsl import dsl

    track = getattr(dsl, "_set_enable_frame_filtering", None)
    if track is None:
        yield
        return
    with mock.patch.object(dsl, "_set_enable_frame_filtering", lambda _: track(False)):
        yield
