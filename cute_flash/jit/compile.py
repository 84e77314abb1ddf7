"""Compiles kernels with `cute.compile`, and exports them as objects that load without the DSL."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from cute_flash.jit.toolchain import check_installed
from cute_flash.planning.launch import CompileKey, LaunchChain, LaunchKey
from cute_flash.planning.registry import KERNELS

SYMBOL = "launch"
LINKERS = ("ld", "cc", "gcc", "clang")

lock = threading.Lock()  # the DSL is a process-wide singleton that compiles one kernel at a time


def cute_compile(key: LaunchKey, options: str = "") -> Any:
    """Trace and compile a kernel, or a `LaunchChain`. The caller must hold `lock`."""
    check_installed()
    import cutlass.cute as cute

    from cute_flash.kernels.common.chain import KernelChain
    from cute_flash.kernels.common.fakes import fake_arguments

    kernels = {one: _kernel(one) for one in key.keys}
    function = KernelChain(kernels) if isinstance(key, LaunchChain) else kernels[key]
    arguments = fake_arguments(key)
    return cute.compile(function, **arguments, options=f"--gpu-arch {key.target} --enable-tvm-ffi {options}".strip())


def _kernel(key: CompileKey) -> Any:
    """The instance of a kernel's class (`KernelSpec.path`), whose call launches the kernel."""
    module, name = KERNELS[key.kernel].path.split(":")
    return getattr(importlib.import_module(f"cute_flash.kernels.{module}"), name)(key.static, key.tile)


def compile_object(key: LaunchKey) -> tuple[bytes, str]:
    """Compile a kernel, or a chain, to an object; return (content, suffix). The caller must hold `lock`."""
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
