"""The kernels that a change of sources reaches.

Machine code depends on the toolchain, on the compile key and on the modules that the kernel's class imports, directly
or not. `sources.json` has a digest of these modules and of the compile keys of the gates' cases for each kernel, as
they were when `python -m tests.lock record` last compiled all cases of that kernel. `make test` compiles all gates of a
kernel whose digest differs from the recorded one, and only `QUICK` cases of the others.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import tokenize
from collections.abc import Iterable
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from cute_flash.planning.plan import CompileKey
from cute_flash.planning.registry import KERNELS
from tests.import_graph import files, reached_from
from tests.lock.cases import AnyCase, cases, compile_key, toolchain
from tests.lock.sample import QUICK, SAMPLE

RECORDED = Path(__file__).with_name("sources.json")
# Set by the option --all-kernels of pytest.
ALL = "TESTS_COMPILE_ALL_KERNELS"
# The package `layouts` counts instructions of kernels, and has a digest as a kernel has one. Its studies count none.
LAYOUTS = "layouts"


def code(text: str) -> str:
    """Python source without comments, docstrings and blank lines, which change no machine code."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_docstring and len(node.body) > 1 and node.body[1].lineno > first.end_lineno:
                lines[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


@cache
def _digest_of_module(module: str) -> str:
    return hashlib.sha256(code(files()[module].read_text(encoding="utf-8")).encode()).hexdigest()


@cache
def traced_modules(kernel: str) -> frozenset[str]:
    """The modules that a kernel's class imports, the modules of its arguments' types, and `jit.compile`.

    A package is left out if no module imports a name from it: then its own imports do not change the kernel.
    """
    if kernel == LAYOUTS:
        modules = (module for module in files() if module.startswith(LAYOUTS))
        return frozenset(module for module in modules if not module.startswith(f"{LAYOUTS}.studies"))
    module = KERNELS[kernel].path.partition(":")[0]
    roots = (f"cute_flash.kernels.{module}", "cute_flash.kernels.common.fakes")
    return frozenset({*reached_from(roots, runs_packages=False), "cute_flash.jit.compile"})


def _described(key: CompileKey) -> str:
    described = asdict(key)
    # As in `jit.digest`: fields that only decide which row of a tile table is chosen.
    described["tile"] = {field.name: described["tile"][field.name] for field in fields(key.tile) if field.compare}
    return json.dumps(described, sort_keys=True)


@cache
def _by_name() -> dict[str, AnyCase]:
    return {case.name: case for case in cases()}


@cache
def kernel_of(name: str) -> str:
    """The kernel of a case, by the case's name. Gates may have decode cases that the lock does not have."""
    case = _by_name().get(name)
    return "decode" if case is None else compile_key(case).kernel


@cache
def digest_of_kernel(kernel: str) -> str:
    """A digest of the sources that decide a kernel's machine code, and of the keys of its sample of the lock."""
    parts = [f"{module} {_digest_of_module(module)}" for module in sorted(traced_modules(kernel))]
    keys = (compile_key(_by_name()[name]) for name in SAMPLE)
    parts += sorted(_described(key) for key in keys if key.kernel == kernel)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@cache
def changed_kernels() -> frozenset[str]:
    """The kernels whose sources are not those that were recorded with this toolchain."""
    recorded = _read(RECORDED).get(toolchain(), {})
    return frozenset(name for name in (*KERNELS, LAYOUTS) if recorded.get(name) != digest_of_kernel(name))


def is_reached(name: str) -> bool:
    """Whether `make test` compiles a case: it is one of `QUICK`, or the sources of its kernel changed."""
    return name in QUICK or compiles_all() or kernel_of(name) in changed_kernels()


def reaches(item: Any) -> bool:
    """Whether `make test` runs a pytest item with the marker `kernels`.

    The marker's arguments are names of kernels. Without arguments, the parameter `name` of the test is that of a case.
    """
    marker = item.get_closest_marker("kernels")
    if marker is None or compiles_all():
        return True
    return bool(changed_kernels() & set(marker.args)) if marker.args else is_reached(item.callspec.params["name"])


def compiles_all() -> bool:
    return bool(os.environ.get(ALL))


def record(path: Path, checked: Iterable[str]) -> list[str]:
    """Write the digests of the kernels all of whose cases were checked; return these kernels."""
    unchecked = {kernel_of(name) for name in set(_by_name()) - set(checked)}
    whole = [kernel for kernel in KERNELS if kernel not in unchecked]
    whole += [] if unchecked else [LAYOUTS]
    everything = _read(path)
    everything[toolchain()] = {
        **{name: value for name, value in everything.get(toolchain(), {}).items() if name in (*KERNELS, LAYOUTS)},
        **{kernel: digest_of_kernel(kernel) for kernel in whole},
    }
    path.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return whole


def _read(path: Path) -> dict[str, dict[str, str]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
