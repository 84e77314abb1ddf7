"""The digest that names the object of a kernel, in the disk cache and in a pack.

It covers the compile key, the sources that generate code, the versions of the DSL and of TVM-FFI, the DSL's CUDA
flavour (cu12, cu13) and the host platform.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from cute_flash.jit.toolchain import toolchain
from cute_flash.planning.launch import CompileKey, LaunchKey

# Folders and files of the package that determine the generated code; jit/compile.py has the compiler's options.
SOURCES = ("device", "jit/compile.py", "kernels", "planning", "score_mod", "smem", "spec")


def digest(key: LaunchKey) -> str:
    """The name of the object of a compiled function."""
    facts = {"keys": [_described(one) for one in key.keys], **build_facts()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]


def _described(key: CompileKey) -> dict[str, Any]:
    described = asdict(key)
    # Fields that only decide which row of the tile table is chosen do not change the kernel.
    described["tile"] = {x.name: described["tile"][x.name] for x in fields(key.tile) if x.compare}
    return described


def build_facts() -> dict[str, str]:
    """The digest of the sources and the versions of the toolchain, on which the objects of all kernels depend."""
    return {"sources": source_digest(), **toolchain()}


@lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of the paths and contents of `SOURCES`."""
    root = str(Path(__file__).parents[1])
    sha256 = hashlib.sha256()
    for path in sorted(source_files(root)):
        with open(path, "rb", buffering=0) as file:
            sha256.update(path[len(root) :].encode() + b"\0" + file.read())
    return sha256.hexdigest()


def source_files(root: str) -> Iterator[str]:
    """The paths of `SOURCES` below the package's folder."""
    for name in SOURCES:
        if name.endswith(".py"):
            yield os.path.join(root, name)
        # `os.walk` takes half the time of `Path.glob`, and the first call of every process waits for it.
        for folder, _, files in os.walk(os.path.join(root, name)):
            yield from (os.path.join(folder, file) for file in files if file.endswith(".py"))
