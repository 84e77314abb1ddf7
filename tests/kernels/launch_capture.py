"""Records the launches of compiled kernels without a GPU: grid, threads of a CTA, shared memory and attributes.

The host code of a compiled kernel checks its arguments and calls the CUDA runtime through a small shim library. Here a
stub replaces that library, and the tensors are CPU tensors that claim to be on a GPU. The stub's symbols are global, so
its process can launch no real kernel afterwards. Therefore it is a separate process,

    python -m tests.kernels.launch_capture FOLDER

which compiles the stub into FOLDER, reads a pickled list of requests from stdin, and writes a list of launches.
"""

from __future__ import annotations

import ctypes
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from cute_flash.jit import kernels as loading
from cute_flash.planning.launch import CompileKey, LaunchChain, LaunchKey
from cute_flash.planning.plan import plan_forward
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.runtime import launcher
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.shapes import outputs
from tests.fakes.recording import RecordingGpu
from tests.jit.gates import kernel_resources
from tests.lock.cases import Case, call_of
from tests.mod_cases import Sizes

STUB = r"""
#include <stdint.h>
#include <string.h>
typedef struct { int32_t id, pad; int32_t value[16]; } Attribute;
typedef struct {
  uint32_t grid[3], block[3]; uint64_t smem; void *stream; Attribute *attributes; uint32_t num_attributes;
} Config;
typedef struct { int64_t grid[3], block[3], smem, num_attributes, attributes[4][2]; char symbol[256]; } Launch;
static Launch launches[16];
static int32_t num_launches, library;
int captured(Launch *to) {
  int count = num_launches;
  memcpy(to, launches, sizeof launches);
  num_launches = 0;
  return count;
}
int _cudaLaunchKernelEx(Config *config, void *kernel, void **parameters) {
  Launch *to = &launches[num_launches++];
  for (int i = 0; i < 3; ++i) { to->grid[i] = config->grid[i]; to->block[i] = config->block[i]; }
  to->smem = config->smem;
  to->num_attributes = config->num_attributes;
  for (int i = 0; i < config->num_attributes; ++i) {
    to->attributes[i][0] = config->attributes[i].id;
    to->attributes[i][1] = config->attributes[i].value[0];
  }
  strncpy(to->symbol, kernel, 255);
  return 0;
}
int _cudaLibraryLoadData(void **loaded, void *d, void *a, void *b, int n, void *c, void *e, int m) {
  *loaded = &library; return 0;
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = strdup(name); return 0; }
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
    """A call of a case of the cubin lock (`tests.lock`), with other sizes."""

    case: Case
    sizes: Sizes
    is_bshd: bool = False  # q, k and v are (B, S, H, D) in memory
    tile: FwdTileSm90 | None = None  # instead of the tile of the table
    is_chained: bool = False  # one host call for all kernels, as the launcher does


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem_bytes: int
    attributes: tuple[tuple[int, int], ...]  # numbers of `cudaLaunchAttributeID`, and values
    symbol: str  # without the number of the kernel in its cubin


class _Launch(ctypes.Structure):
    """A launch as the stub records it."""

    _fields_ = [
        ("grid", ctypes.c_int64 * 3),
        ("block", ctypes.c_int64 * 3),
        ("smem", ctypes.c_int64),
        ("num_attributes", ctypes.c_int64),
        ("attributes", ctypes.c_int64 * 2 * 4),
        ("symbol", ctypes.c_char * 256),
    ]


def has_compiler() -> bool:
    return shutil.which("cc") is not None


def capture(requests: list[Request], folder: Path) -> list[list[Launch]]:
    """The launches of each request, recorded in a separate process."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(folder)],
        input=pickle.dumps(requests),
        capture_output=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    if done.returncode:
        raise RuntimeError(done.stderr.decode())
    return pickle.loads(done.stdout)


# ---- a tensor as DLPack describes it (dlpack.h)


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
DTYPES = {
    torch.bfloat16: (4, 16, 1), torch.float16: (2, 16, 1), torch.float32: (2, 32, 1), torch.int64: (0, 64, 1),
    torch.int32: (0, 32, 1), torch.uint8: (1, 8, 1),
}  # fmt: skip


class OnGpu:
    """A CPU tensor that claims to be on GPU 0. Its memory is never read."""

    def __init__(self, tensor: Tensor):
        rank = tensor.dim()
        self.tensor = tensor
        self.shape, self.strides = ((ctypes.c_int64 * rank)(*numbers) for numbers in (tensor.shape, tensor.stride()))
        dtype = _DataType(*DTYPES[tensor.dtype])
        described = _Tensor(tensor.data_ptr(), _Device(CUDA, 0), rank, dtype, self.shape, self.strides, 0)
        self.managed = _Managed(described, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)


# ---- the process


def num_kernels(key: CompileKey) -> int:
    """The number of launches of a kernel class: `split_fp32` launches two kernels for each tensor."""
    if not key.kernel.startswith("split_fp32"):
        return 1
    return 2 * sum(operand.type == "pieces" for operand in key.parameters)


class CapturingGpu(RecordingGpu):
    """Launches go through the host code of compiled kernels, down to the stub."""

    def __init__(self, request: Request, captured: Callable[..., int]) -> None:
        super().__init__(ARCHS[request.case.arch])
        self.captured = captured
        self.launches: list[Launch] = []
        self.is_chained = request.is_chained

    def chain(self, key: LaunchChain) -> Callable[..., None]:
        return self._capturing(key) if self.is_chained else super().chain(key)

    def kernel(self, key: CompileKey) -> Callable[..., None]:
        kernel_resources(key)  # compiles it, unless another test did
        return self._capturing(key)

    def _capturing(self, key: LaunchKey) -> Callable[..., None]:
        import tvm_ffi

        function = loading.compiled_kernel(key)

        def launch(*arguments: Any) -> None:
            held: list[OnGpu] = []

            def on_gpu(x: Any) -> Any:
                if isinstance(x, (list, tuple)):
                    return list(map(on_gpu, x))
                if not isinstance(x, Tensor):
                    return x
                held.append(OnGpu(x.detach()))
                return tvm_ffi.from_dlpack(held[-1])

            function(*map(on_gpu, arguments))
            launched = (_Launch * 16)()
            kernels = [one.kernel for one in key.keys for _ in range(num_kernels(one))]
            assert self.captured(launched) == len(kernels), "another number of launches than of kernels"
            self.launches += [self._launch(*pair) for pair in zip(kernels, launched)]

        return launch

    @staticmethod
    def _launch(kernel: str, launch: Any) -> Launch:
        attributes = tuple(map(tuple, launch.attributes[: launch.num_attributes]))
        symbol, _, _number = launch.symbol.decode().rpartition("_")
        return Launch(kernel, tuple(launch.grid), tuple(launch.block), launch.smem, attributes, symbol)


def _call(request: Request) -> None:
    q, k, v, args = call_of(request.case, request.sizes)
    if request.is_bshd:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    planner = partial(plan_forward, tile=request.tile)
    if request.case.direction == "fwd":
        with mock.patch.object(launcher, "plan_attention", planner):
            launcher.forward(q, k, v, args)
        return
    out, lse, _max_logit = outputs(q, v, args)
    launcher.backward(out, lse if request.case.has_dlse else None, q, k, v, out, lse, args)


def main() -> None:
    folder = Path(sys.argv[1])
    source, stub = folder / "stub.c", folder / "stub.so"
    source.write_text(STUB)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", stub, source], check=True)
    captured = ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL).captured
    preload = loading._preload
    # The symbols of every entry are found in the stub; the digest still names the real runtime.
    loading._preload = lambda library: preload(str(stub))  # type: ignore[assignment]
    answers = []
    for request in pickle.load(sys.stdin.buffer):
        gpu = CapturingGpu(request, captured)
        with use_gpu(gpu):
            _call(request)
        answers.append([tuple(launch) for launch in gpu.launches])
    sys.stdout.buffer.write(pickle.dumps(answers))


if __name__ == "__main__":
    main()
