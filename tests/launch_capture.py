"""What a compiled kernel would launch, seen without a GPU: grid, block and shared memory.

The host code of a compiled kernel calls the CUDA runtime through a small shim library. Here a stub takes the
place of that library, and the tensors are CPU tensors that say they are on a GPU. The stub's symbols are
global to the process, where no kernel would ever be launched again: so this runs as a process of its own,

    python -m tests.launch_capture FOLDER < requests

which compiles the stub into FOLDER, reads a JSON list of requests and prints a JSON list of answers.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from cute_flash.forward import extra_arguments
from torch import Tensor

from cute_flash.jit import compile as compiling
from cute_flash.planning.plan import Plan, plan
from cute_flash.spec.arch import by_name
from cute_flash.spec.args import How
from cute_flash.spec.band import Band
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Features, Problem
from tests import mod_cases

STUB = r"""
#include <stdint.h>
typedef struct {
  uint32_t grid[3], block[3]; uint64_t smem; void *stream, *attributes; uint32_t num_attributes;
} Config;
static Config last;
static int64_t launches;
void captured(int64_t *to) {
  to[0] = launches;
  for (int i = 0; i < 3; ++i) { to[1 + i] = last.grid[i]; to[4 + i] = last.block[i]; }
  to[7] = (int64_t)last.smem;
}
int _cudaLaunchKernelEx(Config *config, void *kernel, void **parameters) {
  last = *config; ++launches; return 0;
}
int _cudaLibraryLoadData(void **library, void *d, void *a, void *b, int n, void *c, void *e, int m) {
  *library = &last; return 0;
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = &last; return 0; }
int _cudaLibraryUnload(void *library) { return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { return 0; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 0; return 0; }
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { *value = 0; return 0; }
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int cuda_dialect_assert_success(int code) { return 0; }
int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*load)(void **, int), void *e) {
  if (!*state) { init(state); load(state, 0); }
  return 0;
}
void cuda_dialect_unload_library_once(void **state) {}
void CuteDSLRT_TVMFFISetRaisedCudaError(void *where, int code) {}
"""


@dataclass(frozen=True)
class Request:
    """One call: a problem by its sizes, its mask, and the architecture and kernel family to compile for."""

    target: str
    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    left: int | None = None
    right: int | None = None
    family: str = "sm80"
    head_dim_v: int | None = None
    is_bshd: bool = False  # heads inside the rows: strides out of order
    is_packed: bool = False  # the heads of a group are rows of one tile
    tile: dict[str, int] | None = None  # instead of the table's
    features: list[str] = field(default_factory=list)
    kind: str = ""  # of `mod_cases.KINDS`: its functions, bias and map, on the other sizes

    def plan(self) -> Plan:
        sizes = (self.batch, self.heads, self.heads_kv, self.seqlen_q, self.seqlen_k, self.head_dim)
        features, band = Features(**dict.fromkeys(self.features, True)), Band(self.left, self.right)
        with use_kernels(self.family):
            problem = Problem(*sizes, band=band, head_dim_v=self.head_dim_v, features=features)
            if self.kind:
                problem = self.case().problem()[0]
            found = plan(problem, by_name(self.target), is_packable=self.is_packed)
        return replace(found, tile=type(found.tile)(**self.tile)) if self.tile else found

    def case(self) -> mod_cases.Case:
        kind = next(one for one in mod_cases.KINDS if one.id == self.kind)
        sizes = (self.batch, self.heads, self.heads_kv, self.seqlen_q, self.seqlen_k)
        return mod_cases.Case(kind, mod_cases.Sizes(*sizes), device="cpu")

    def tensors(self) -> list[Tensor]:
        """q, k, v, out, lse."""

        def tensor(heads: int, seqlen: int, width: int) -> Tensor:
            order = (seqlen, heads) if self.is_bshd else (heads, seqlen)
            zeros = torch.zeros(self.batch, *order, width, dtype=torch.bfloat16)
            return zeros.transpose(1, 2) if self.is_bshd else zeros

        group, width_v = self.heads // self.heads_kv, self.head_dim_v or self.head_dim
        rows = (self.heads_kv, group * self.seqlen_q) if self.is_packed else (self.heads, self.seqlen_q)
        q, out = tensor(*rows, self.head_dim), tensor(*rows, width_v)
        out = out.float() if "out_dtype" in self.features else out
        k, v = (tensor(self.heads_kv, self.seqlen_k, width) for width in (self.head_dim, width_v))
        return [q, k, v, out, torch.zeros(q.shape[:3])]

    def extras(self) -> tuple[Any, ...]:
        """What a call makes of its features, as `forward` does."""
        if self.kind:
            case = self.case()
            return (
                *extra_arguments(case.call()[0], 0.1, torch.zeros(self.heads), (0, 0)),
                *case.problem()[1],
            )
        if not self.features:
            return ()
        asked = set(self.features)
        how = How(
            0.1, self.left, self.right,
            softcap=3.0 if "softcap" in asked else 0.0,
            alibi=torch.zeros(self.heads) if "alibi" in asked else None,
            sinks=torch.zeros(self.heads, 2)[:, 1] if "sinks" in asked else None,
            dropout=0.75 if "dropout" in asked else 0.0,
            rng=torch.zeros(2, dtype=torch.int64) if "dropout" in asked else None,
            max_logit="return_max_logit" in asked,
        )  # fmt: skip
        return extra_arguments(how, 0.1, torch.zeros(self.heads), (self.batch, self.heads))


@dataclass(frozen=True)
class Answer:
    launches: int  # so far, in this process
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem_bytes: int


def has_compiler() -> bool:
    return shutil.which("cc") is not None


def capture(requests: list[Request], folder: Path) -> list[Answer]:
    """Run the requests in a process of their own."""
    return [
        Answer(one["launches"], tuple(one["grid"]), tuple(one["block"]), one["smem_bytes"])
        for one in answers_of("tests.launch_capture", [asdict(request) for request in requests], folder)
    ]


def answers_of(module: str, requests: list[dict[str, Any]], folder: Path) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder)],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


# A tensor as DLPack describes it (dlpack.h).


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("index", ctypes.c_int)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


CUDA = 2
# The address of a counter, which only a GPU would read.
COUNTER = 1 << 40
DTYPES = {
    torch.bfloat16: (4, 16, 1), torch.float16: (2, 16, 1), torch.float32: (2, 32, 1), torch.int64: (0, 64, 1),
    torch.int32: (0, 32, 1), torch.uint8: (1, 8, 1),
}  # fmt: skip


class OnGpu:
    """A CPU tensor that says it is on GPU 0. Its memory is never read."""

    def __init__(self, tensor: Tensor):
        rank = tensor.dim()
        self.tensor = tensor
        self.shape, self.strides = (
            (ctypes.c_int64 * rank)(*numbers) for numbers in (tensor.shape, tensor.stride())
        )
        self.managed = _Managed(
            _Tensor(
                tensor.data_ptr(),
                _Device(CUDA, 0),
                rank,
                _DataType(*DTYPES[tensor.dtype]),
                self.shape,
                self.strides,
                0,
            ),
            None,
            None,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)


def _build_stub(folder: Path) -> Path:
    source, library = folder / "stub.c", folder / "stub.so"
    source.write_text(STUB)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def _call(function: Callable[..., None], request: Request, chosen: Plan) -> None:
    import tvm_ffi

    tensors = [OnGpu(x) for x in request.tensors()]
    arguments = (*chosen.launch_arguments, *([COUNTER] if chosen.draws_tiles else []))
    held: list[OnGpu] = []

    def passed(x: Any) -> Any:
        if isinstance(x, list):
            return list(map(passed, x))
        if not isinstance(x, Tensor):
            return x
        held.append(OnGpu(x))
        return tvm_ffi.from_dlpack(held[-1])

    extras = request.extras()
    given = list(map(passed, extras))
    # After them the list of a packed batch's tiles.
    items = (None,) if extras else ()
    window = request.left or 0, request.right or 0
    function(*map(tvm_ffi.from_dlpack, tensors), 0.1, *window, *arguments, *given, *items)


def main() -> None:
    stub = _build_stub(Path(sys.argv[1]))
    captured = ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL).captured
    preload = compiling._preload
    # Every entry's symbols are to be found in the stub; the digest still names the real runtime.
    compiling._preload = lambda library: preload(str(stub))  # type: ignore[assignment]
    answers = []
    for request in (Request(**fields) for fields in json.load(sys.stdin)):
        chosen = request.plan()
        _call(compiling.compiled(chosen), request, chosen)
        numbers = (ctypes.c_int64 * 8)()
        captured(numbers)
        answers.append(asdict(Answer(numbers[0], tuple(numbers[1:4]), tuple(numbers[4:7]), numbers[7])))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
