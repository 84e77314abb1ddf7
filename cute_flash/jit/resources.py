"""The resources of a kernel, read from its machine code without a GPU: registers, spills, shared memory, SASS."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import pickle
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from cute_flash.jit import compile as compiling
from cute_flash.jit.digest import digest
from cute_flash.jit.disk import RESOURCES, SUFFIXES, DiskCache
from cute_flash.planning.plan import CompileKey

_SPILLS = re.compile(
    r"(\d+)\s+bytes\s+stack\s+frame,\s+(\d+)\s+bytes\s+spill\s+stores,\s+(\d+)\s+bytes\s+spill\s+loads"
)
_REGISTERS = re.compile(r"Used\s+(\d+)\s+registers")
_SERIALISED = re.compile(r"\((C75\d\d)\)")
_SETMAXNREG = re.compile(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
# Instructions of tensor cores, loads and stores of their operands, the softmax, and synchronization.
_SHOWN = (
    "HMMA", "HGMMA", "LDSM", "STSM", "LDGSTS", "UTMALDG", "UTMASTG", "MUFU", "FFMA", "FMUL", "SHFL",
    "BAR", "SYNCS",
)  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """The resources of one compiled kernel, with its cubin and PTX.

    The cubin of `kernels.common.split_fp32` has several kernels: `symbol` is the first, `registers` and `stack_bytes`
    are the largest, spills and instructions are those of all.
    """

    symbol: str
    target: str
    registers: int  # per thread at launch
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int
    serialised_wgmma: tuple[str, ...]  # ptxas notes that wgmma was serialised, or setmaxnreg ignored
    sass: Counter[str] = field(default_factory=Counter)  # instructions by name; empty without a disassembler
    cubin: bytes = field(default=b"", repr=False)
    ptx: str = field(default="", repr=False)

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def mma(self) -> str:
        """The number of each tensor-core instruction, as text."""
        counts = [f"{self.sass[name]} {name}" for name in ("HMMA", "HGMMA") if self.sass[name]]
        return " and ".join(counts) or ("no MMA" if self.sass else "MMAs not counted (no nvdisasm)")

    @property
    def setmaxnreg(self) -> tuple[int, ...]:
        """The register counts per thread that setmaxnreg sets, ascending; empty if the kernel does not use it."""
        return tuple(sorted({int(count) for count in _SETMAXNREG.findall(self.ptx)}))

    @property
    def registers_text(self) -> str:
        moved = f" at launch, then {' or '.join(map(str, self.setmaxnreg))}" if self.setmaxnreg else ""
        return f"{self.registers}{moved}"

    def lines(self) -> list[str]:
        mix = ", ".join(f"{name} {self.sass[name]}" for name in _SHOWN if self.sass[name])
        return [
            f"symbol    {self.symbol} ({self.target}), {len(self.cubin) / 1024:.0f} KB of code",
            f"registers {self.registers_text} a thread, {self.spill_bytes} bytes spilled",
            f"shared    {self.smem_bytes / 1024:.0f} KB",
            f"SASS      {mix or 'no disassembler found: pip install nvidia-cuda-nvdisasm'}",
        ]


def cached_resources(key: CompileKey) -> Resources:
    """The resources of a kernel, from the disk cache. On a miss the kernel is compiled, and stored for launches too."""
    cache, kernel = DiskCache.default(), digest(key)
    name = f"{kernel}.{_reader_digest()}"
    with compiling.lock, cache.locked(kernel):
        path = cache.find(name, RESOURCES)
        if path is not None:
            resources = pickle.loads(path.read_bytes())
            # The disassembler may have been installed after the entry was stored.
            return resources if resources.sass else replace(resources, sass=_instructions(resources.cubin))
        resources, function = _compile(key)
        if not any(cache.find(kernel, suffix) for suffix in SUFFIXES):
            cache.store(kernel, *compiling.export(function))
        cache.store(name, pickle.dumps(resources), RESOURCES)
        return resources


@lru_cache(maxsize=1)
def _reader_digest() -> str:
    """A digest of this file, which defines the content of `Resources`."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


def kernel_resources(key: CompileKey) -> Resources:
    """Compile a kernel and return its resources. This takes seconds; nothing is cached."""
    with compiling.lock:
        return _compile(key)[0]


def _compile(key: CompileKey) -> tuple[Resources, Any]:
    """The resources of a kernel, and the compiled function. The caller must hold `compile.lock`."""
    return compile_with_resources(partial(compiling.cute_compile, key), key.target, key.tile.smem_bytes)


def compile_with_resources(
    compile_function: Callable[[str], Any], target: str, smem_bytes: int
) -> tuple[Resources, Any]:
    """The resources of what `compile_function` compiles, and the compiled function; it takes options of the DSL."""
    remarks = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="cute_flash_") as folder:
        with contextlib.redirect_stderr(remarks):
            function = compile_function(f"--keep-ptx --keep-cubin --dump-dir={folder} remarks{{ptx}}")
        cubin, ptx = function.__cubin__, function.__ptx__
    log = _COLOUR.sub("", remarks.getvalue())
    registers = [int(count) for count in _REGISTERS.findall(log)]
    # For each kernel: bytes of the stack, of spill stores and of spill loads.
    bytes_used = [tuple(map(int, counts)) for counts in _SPILLS.findall(log)]
    symbol = re.search(r"\.entry (\S+?)\(", ptx)
    if not registers or not bytes_used or symbol is None:
        raise RuntimeError(f"ptxas printed no resource usage for {target}:\n{log}")
    resources = Resources(
        symbol=symbol[1],
        target=target,
        registers=max(registers),
        stack_bytes=max(stack for stack, _, _ in bytes_used),
        spill_store_bytes=sum(stores for _, stores, _ in bytes_used),
        spill_load_bytes=sum(loads for _, _, loads in bytes_used),
        smem_bytes=smem_bytes,
        serialised_wgmma=tuple(sorted(set(_SERIALISED.findall(log)))),
        sass=_instructions(cubin),
        cubin=cubin,
        ptx=ptx,
    )
    return resources, function


def _instructions(cubin: bytes) -> Counter[str]:
    return Counter(_INSTRUCTION.findall(disassemble(cubin)))


def disassemble(cubin: bytes, *options: str) -> str:
    """The SASS of a cubin, with further options of `nvdisasm`; empty without that tool."""
    tool = nvdisasm()
    if tool is None:
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", *options, file.name], capture_output=True, text=True, check=True).stdout


@lru_cache(maxsize=1)
def nvdisasm() -> str | None:
    """The path of nvdisasm, from the wheel nvidia-cuda-nvdisasm or on PATH; None if there is none."""
    try:
        files = importlib.metadata.distribution("nvidia-cuda-nvdisasm").files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = (str(Path(str(file.locate()))) for file in files if file.name == "nvdisasm")
    return next(paths, None) or shutil.which("nvdisasm")
