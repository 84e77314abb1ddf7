"""Records the launches of compiled kernels without a GPU: grid, threads of a CTA and shared memory.

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

from cute_flash.jit import compile as compiling
from cute_flash.planning.plan import CompileKey, plan_forward
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
    """A call of a case of the cubin lock (`tests.lock`), with other sizes."""

    case: Case
    sizes: Sizes
    is_bshd: bool = False  # q, k and v are (B, S, H, D) in memory
    tile: FwdTileSm90 | None = None  # instead of the tile of the table


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem_bytes: int


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


class CapturingGpu(RecordingGpu):
    """Launches go through the host code of compiled kernels, down to the stub."""

    def __init__(self, arch: str, captured: Callable[..., None]) -> None:
        super().__init__(ARCHS[arch])
        self.captured = captured
        self.launches: list[Launch] = []

    def kernel(self, key: CompileKey) -> Callable[..., None]:
        import tvm_ffi

        kernel_resources(key)  # compiles it, unless another test did
        function = compiling.compiled_kernel(key)

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
            numbers = (ctypes.c_int64 * 8)()
            self.captured(numbers)
            count, *sizes, smem_bytes = numbers
            assert count == CapturingGpu.total + 1, "a call that launches nothing, or more than one kernel"
            CapturingGpu.total = count
            self.launches.append(Launch(key.kernel, tuple(sizes[:3]), tuple(sizes[3:]), smem_bytes))

        return launch

    total = 0


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
    preload = compiling._preload
    # The symbols of every entry are found in the stub; the digest still names the real runtime.
    compiling._preload = lambda library: preload(str(stub))  # type: ignore[assignment]
    answers = []
    for request in pickle.load(sys.stdin.buffer):
        gpu = CapturingGpu(request.case.arch, captured)
        with use_gpu(gpu):
            _call(request)
        answers.append([tuple(launch) for launch in gpu.launches])
    sys.stdout.buffer.write(pickle.dumps(answers))


if __name__ == "__main__":
    main()
