"""Records which kernels the cases need. As a pytest plugin, it does so in the step `record`; see `tests.upstream`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.planning.plan import CompileKey
from cute_flash.runtime import gpu
from cute_flash.spec.arch import H200
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.recording import RecordingGpu
from tests.upstream.jobs import Job

HAS_GPU = torch.cuda.is_available()


class _CudaRecorder(gpu.Gpu):
    """Launches on CUDA tensors record their kernels and do nothing."""

    def __init__(self) -> None:
        self.keys: list[CompileKey] = []

    def kernel(self, key: CompileKey) -> Callable[..., None]:
        self.keys.append(key)
        return lambda *arguments: None


@contextmanager
def recording() -> Iterator[list[CompileKey]]:
    """Yield the list of kernels that calls launch. Nothing is launched. Without a GPU, plans are those of an H200."""
    recorder = _CudaRecorder() if HAS_GPU else RecordingGpu(H200)
    with ExitStack() as stack:
        stack.enter_context(gpu.use_gpu(recorder))
        if not HAS_GPU:
            for fake in (claiming_cuda, launching_operators):
                stack.enter_context(fake())
            # Zeros are fast, and do not advance the CPU's generator, as randn on a GPU does not. So tests that draw a
            # window from this generator draw the same one with and without a GPU.
            stack.enter_context(mock.patch.object(torch, "randn", _zeros))
            stack.enter_context(mock.patch.object(torch, "randn_like", torch.zeros_like))
        yield recorder.keys


def _zeros(*size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False, **options: Any) -> Tensor:
    return torch.zeros(*size, dtype=dtype, requires_grad=requires_grad)


def save(keys: list[CompileKey], job: Job) -> None:
    unique = list(dict.fromkeys(keys))
    job.path("pkl").write_bytes(pickle.dumps(unique))
    print(f"\n{len(unique)} kernels recorded")


_stack = ExitStack()
_keys: list[CompileKey] = []
_is_recording = False


def pytest_sessionstart(session: pytest.Session) -> None:
    global _keys, _is_recording
    _is_recording = Job.current().step == "record"
    if _is_recording:
        # Tests that repeat a call and compare the results fail at the first comparison.
        for name in ("equal", "allclose"):
            _stack.enter_context(mock.patch.object(torch, name, lambda *args, **options: False))
        _keys = _stack.enter_context(recording())


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _is_recording:
        _stack.close()
        save(_keys, Job.current())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    gpu.bound.clear()  # every case records its kernels, not only the first of equal call signatures
    item.num_keys = len(_keys)  # type: ignore[attr-defined]
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report an `UnsupportedError` as a skip. While recording, results are wrong, so a case passes if it launches."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if call.when != "call":
        return report
    reason = f"cute_flash refuses: {str(error).splitlines()[0]}" if isinstance(error, UnsupportedError) else None
    if _is_recording and reason is None:
        report.outcome, report.longrepr = "passed", None
        vars(report).pop("wasxfail", None)
        if len(_keys) == item.num_keys:  # type: ignore[attr-defined]
            reason = f"no kernel: {type(error).__name__ if error else 'no error'}"
    if reason is not None:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {reason}")
    return report
