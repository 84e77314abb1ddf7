"""`cute_flash.warmup`: compiles and loads kernels before the first call needs them.

The calls run on torch's fake tensors, which have shapes and no memory. The fake kernels of the operators report each
call to a `Recorder`, which plans it as the launcher would. The kernels of the plans are compiled in parallel, then
loaded.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from cute_flash.api import attn
from cute_flash.errors import UnsupportedError
from cute_flash.jit.disk import DiskCache
from cute_flash.jit.kernels import compiled_kernel, place_of
from cute_flash.ops import OVERRIDDEN
from cute_flash.planning.decode import DecodePlan
from cute_flash.planning.launch import LaunchKey
from cute_flash.planning.plan import Plan
from cute_flash.runtime import decode, launcher
from cute_flash.spec.arch import ArchSpec, by_name, detect, has_gpu, override
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.decode import DecodeArgs
from cute_flash.spec.foreign import refuse_foreign
from cute_flash.tools.precompile import precompile_keys

# A compiling process takes about 1 GB of memory.
MAX_JOBS = 16


@dataclass(frozen=True)
class WarmUp:
    """What `warmup` did. A kernel, or a chain of kernels that one host call launches, counts once.

    Examples:
        >>> import cute_flash
        >>> print(cute_flash.WarmUp(compiled=1, from_pack=0, from_disk=2, in_memory=0, seconds=6.14))
        3 kernel(s) in 6.1 s: 1 compiled, 0 from the pack, 2 from disk, 0 in memory
    """

    compiled: int
    from_pack: int
    from_disk: int  # compiled by an earlier process, or by `cute-flash precompile`
    in_memory: int  # loaded by this process before
    seconds: float

    def __str__(self) -> str:
        total = self.compiled + self.from_pack + self.from_disk + self.in_memory
        return (
            f"{total} kernel(s) in {self.seconds:.1f} s: {self.compiled} compiled, {self.from_pack} from the pack, "
            f"{self.from_disk} from disk, {self.in_memory} in memory"
        )


def warmup(
    calls: Callable[[], Any] | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    *,
    gpu: str | None = None,
    jobs: int | None = None,
    **call: Any,
) -> WarmUp:
    """Compile and load the kernels of calls before the first call needs them.

    Nothing is launched, and no memory of the GPU is allocated for the calls. Kernels that are neither in the kernel
    cache nor in an installed pack are compiled in parallel, with progress on stderr, and stay in the cache.

    A call of `attn` is described by keywords: those of `attn`, and

    - `q_shape`, and `k_shape` and `v_shape` where they differ: by default k has the shape of q, and v that of k;
    - `dtype`: of q, k and v;
    - `backward`: whether to compile the gradients too (default: no). With `return_lse=True`, these are the gradients
      without and with a gradient of the LSE.

    For `attn_varlen`, `attn_decode` and whole models, `calls` is a step: a function without parameters that makes the
    calls, such as the forward and backward pass of a model, without the optimizer. It runs once under torch's
    `FakeTensorMode`: tensors that it creates have no memory, and parameters and other tensors of the caller are
    replaced by fake ones. It cannot read the values of tensors, and runs no kernels of other libraries besides torch's
    operators. Functions compiled by `torch.compile` run eagerly. Merges of `cute_flash.distributed` are not seen.

    On a machine without a GPU, the kernels are compiled for `gpu` and not loaded, and a step has CPU tensors.

    Args:
        calls: A step, the keywords of one call, or the keywords of several calls.
        gpu: The architecture or GPU to compile for, such as "sm_90" or "A100"; by default `CUTE_FLASH_ARCH`, else the
            GPU of the tensors. Kernels for a named GPU are not loaded.
        jobs: The number of processes, about 1 GB each; by default one for each core, at most 16.
        **call: The keywords of one call, instead of `calls`.

    Returns:
        A `WarmUp`: how many kernels were compiled, found in the pack or on disk, and in memory already.

    Raises:
        ValueError: The arguments are invalid.
        UnsupportedError: No kernel supports a call, a step reads the value of a tensor, or there is no GPU and `gpu` is
            missing.

    Examples:
        >>> import torch, cute_flash
        >>> cute_flash.warmup(q_shape=(8, 32, 4096, 128), dtype=torch.bfloat16, causal=True).compiled  # doctest: +SKIP
        1
        >>> layer = torch.nn.Linear(64, 3 * 64)
        >>> def step():
        ...     q, k, v = layer(torch.empty(2, 128, 64)).unflatten(-1, (3, 1, 64)).unbind(2)
        ...     cute_flash.attn(q, k, v, layout="bshd").sum().backward()
        >>> cute_flash.warmup(step, gpu="sm_90").compiled  # doctest: +SKIP
        2
    """
    start = time.perf_counter()
    spec = by_name(gpu) if gpu else override()
    keys = recorded_keys(calls, spec, **call)
    places = {key: place_of(key) for key in keys}
    missing = [key for key, place in places.items() if not place]
    if missing:
        jobs = jobs or min(MAX_JOBS, len(os.sched_getaffinity(0)))
        # Processes cannot share a temporary cache.
        precompile_keys(missing, jobs if DiskCache.default().is_persistent else 1)
    if spec is None:
        for key in keys:
            compiled_kernel(key)
    counts = Counter(places.values())
    return WarmUp(
        compiled=len(missing),
        from_pack=counts["pack"],
        from_disk=counts["disk"],
        in_memory=counts["memory"],
        seconds=time.perf_counter() - start,
    )


def recorded_keys(calls: Any, spec: ArchSpec | None, **call: Any) -> list[LaunchKey]:
    """The kernels that calls need, each once, in the order of the calls. The arguments are those of `warmup`."""
    if (calls is None) == (not call):
        raise ValueError("warmup() takes a step, a list of calls, or the keywords of one call, such as q_shape=")
    if spec is None and not has_gpu():
        raise UnsupportedError('warmup without a GPU: name one, such as gpu="sm_90", or set CUTE_FLASH_ARCH')
    recorder = Recorder(spec)
    if callable(calls):
        run_fake(calls, recorder)
        return list(recorder.keys)
    many: list[Mapping[str, Any]] = [call] if calls is None else [calls] if isinstance(calls, Mapping) else list(calls)
    for one in many:
        for name in ("q_shape", "dtype"):
            if name not in one:
                raise ValueError(
                    f"warmup: a call without {name}: give q_shape=(B, H, S, D) and the dtype of q, k and v"
                )
        run_fake(lambda one=one: _call(**one), recorder)  # type: ignore[misc]
    return list(recorder.keys)


class Recorder:
    """Plans the calls of fake tensors, and collects the kernels of the plans.

    The methods return whether they planned a call. A call on CPU tensors is planned if `spec` names a GPU.
    """

    def __init__(self, spec: ArchSpec | None) -> None:
        self.spec = spec  # None: that of the GPU of each call
        self.keys: dict[LaunchKey, None] = {}  # a set in the order of the calls

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, is_recorded: bool) -> bool:
        return self._planned(q, lambda gpu: launcher.forward_plan(q, k, v, args, is_recorded, gpu))

    def backward(self, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> bool:
        return self._planned(q, lambda gpu: launcher.backward_plan(dlse, q, k, v, args, gpu))

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> bool:
        if decode.only_appends(q, args):
            q, args = decode.append_call(args)
        return self._planned(q, lambda gpu: decode.plan_call(q, k_cache, v_cache, args, gpu, has_addresses=False))

    def _planned(self, q: Tensor, plan: Callable[[ArchSpec], Plan | DecodePlan | None]) -> bool:
        gpu = self.spec or (detect(q.device.index) if q.device.type == "cuda" else None)
        found = None if gpu is None else plan(gpu)
        if found is not None:
            # The launches of a decode plan are host calls.
            self.keys |= dict.fromkeys(found.launches if isinstance(found, DecodePlan) else found.host_calls)
        return gpu is not None


def run_fake(step: Callable[[], Any], recorder: Recorder) -> None:
    """Run a step on fake tensors, whose calls of attention the recorder plans."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cute_flash_recorder = recorder  # type: ignore[attr-defined]
    try:
        with _without_compiler(), mode, OverriddenOperators():
            step()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedError(
            f"warmup: the step reads the values of a tensor ({error}), and fake tensors have none: compute them before "
            "the step, or warm up its calls of attention alone"
        ) from error
    finally:
        _drop_gradients(mode)


class OverriddenOperators(TorchDispatchMode):
    """Calls the kernels of `cute_flash.integrations.sdpa`, if it is active, in place of torch's operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return OVERRIDDEN.get(func, func)(*args, **kwargs or {})


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Run functions that `torch.compile` made eagerly: their graphs would hide the calls."""
    if "torch._dynamo" not in sys.modules:
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield


def _drop_gradients(mode: FakeTensorMode) -> None:
    """Remove the fake gradients that a backward pass gave to tensors of the caller, such as parameters."""
    for x in gc.get_objects():
        if issubclass(type(x), Tensor) and type(x) is not FakeTensor and x.is_leaf:
            if getattr(x.grad, "fake_mode", None) is mode:
                x.grad = None


def _call(
    *,
    q_shape: tuple[int, ...],
    dtype: torch.dtype,
    k_shape: tuple[int, ...] | None = None,
    v_shape: tuple[int, ...] | None = None,
    backward: bool = False,
    **keywords: Any,
) -> None:
    """Make a call of `attn` on empty tensors, and its gradients."""
    refuse_foreign("attn", (), {name: x for name, x in keywords.items() if name not in signature(attn).parameters})
    device = "cuda" if has_gpu() else "cpu"
    k_shape = k_shape or q_shape
    with torch.set_grad_enabled(backward):
        q, k, v = (
            torch.empty(shape, dtype=dtype, device=device, requires_grad=backward)
            for shape in (q_shape, k_shape, v_shape or k_shape)
        )
        results = attn(q, k, v, **keywords)
        if not backward:
            return
        out, *others = results if isinstance(results, tuple) else (results,)
        torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        if keywords.get("return_lse"):
            torch.autograd.grad(out.sum() + others[0].sum(), (q, k, v))
