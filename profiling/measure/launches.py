"""Kernel launches of cute_flash: recording, repeating them without the call around them, and tiles of another GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash.planning.launch import CompileKey, LaunchChain, LaunchKey
from cute_flash.spec.arch import ArchSpec, by_name
from profiling.measure.timing import TimedCall


class Launch(NamedTuple):
    key: LaunchKey
    function: Callable[..., None]
    args: tuple[Any, ...]


@contextmanager
def recorded_launches(is_dry: bool = False) -> Iterator[list[Launch]]:
    """Record every kernel launch of cute_flash inside the block, in order, with its positional arguments.

    With `is_dry` nothing is compiled or launched: the list has the kernels that the calls need. `use_gpu` restores
    the functions that were bound before, so that timed calls do not run through the recorder.
    """
    from cute_flash.runtime.gpu import current_gpu, use_gpu

    launches: list[Launch] = []
    gpu = current_gpu()
    recorder = copy(gpu)

    def recorded(load: Callable[[Any], Callable[..., None]]) -> Callable[[Any], Callable[..., None]]:
        def kernel(key: LaunchKey) -> Callable[..., None]:
            function = (lambda *args: None) if is_dry else load(key)

            def launch(*args: Any) -> None:
                launches.append(Launch(key, function, args))
                function(*args)

            return launch

        return kernel

    recorder.kernel, recorder.chain = recorded(gpu.kernel), recorded(gpu.chain)  # type: ignore[assignment, method-assign]
    with use_gpu(recorder):
        yield launches


@contextmanager
def tiles_of(gpu_name: str) -> Iterator[None]:
    """Plan as on another GPU, such as "A100", and compile the kernels for the GPU here.

    The other GPU decides the tiles, by its architecture and its shared memory. The number of SMs, the size of L2 and
    the bandwidth of HBM are those of the GPU here.
    """
    from cute_flash.runtime.gpu import current_gpu, use_gpu

    here, other = current_gpu(), by_name(gpu_name)
    planner = copy(here)

    def arch(index: int | None) -> ArchSpec:
        own = here.arch(index)
        return replace(other, gpu=own.gpu, num_sms=own.num_sms, l2_bytes=own.l2_bytes, hbm_tbps=own.hbm_tbps)

    def compiled_here(key: CompileKey) -> CompileKey:
        return replace(key, target=here.arch(here.current_device()).target)

    def kernel(key: CompileKey) -> Callable[..., None]:
        return here.kernel(compiled_here(key))

    def chain(key: LaunchChain) -> Callable[..., None]:
        return here.chain(LaunchChain(tuple(compiled_here(one) for one in key.keys)))

    planner.arch, planner.kernel, planner.chain = arch, kernel, chain  # type: ignore[method-assign]
    with use_gpu(planner):
        yield


def needed_kernels(calls: Iterable[Callable[[], Any]]) -> list[LaunchKey]:
    """The kernels that these calls of cute_flash need, each once; nothing is compiled or launched.

    A call that fails here fails in the run too, which reports its error.
    """
    keys: dict[LaunchKey, None] = {}
    for call in calls:
        with recorded_launches(is_dry=True) as launches, suppress(Exception):
            call()
        keys.update(dict.fromkeys(one.key for one in launches))
    return list(keys)


def floor_of(ours: TimedCall, made_by_torch: Callable[[], Tensor] | None = None) -> TimedCall | None:
    """The allocations and the launches of a call, without anything else; None if it launches no kernel.

    An argument in memory that two calls do not share was allocated by the call. Launches of one stream are
    ordered, so the floor's launches may share the recorded outputs, workspace and counters. `made_by_torch` makes an
    operand by a torch kernel; the floor runs it in place of that operand's allocation.
    """
    with ours.context(), recorded_launches() as launches:
        ours.call()
        num_first = len(launches)
        ours.call()
    first, second = launches[:num_first], launches[num_first:]
    if [one.key for one in first] != [one.key for one in second]:
        raise RuntimeError("two calls of one case launch different kernels")
    if not second:
        return None
    shared = set(_memory(first))
    made = None if made_by_torch is None else made_by_torch()
    allocations: list[Callable[[], Tensor]] = []
    for address, x in _memory(second).items():
        if address in shared:
            continue
        is_made = made is not None and (x.shape, x.dtype) == (made.shape, made.dtype)
        allocations.append(made_by_torch if is_made and made_by_torch else partial(torch.empty_like, x))
    bare = [partial(one.function, *one.args) for one in second]

    def floor() -> None:
        _held = [allocate() for allocate in allocations]
        for launch in bare:
            launch()

    return TimedCall(floor, ours.context)


def _memory(launches: Sequence[Launch]) -> dict[int, Tensor]:
    """The tensors among the arguments, by the address of their memory; one per address."""
    tensors: dict[int, Tensor] = {}
    for one in launches:
        for x in one.args:
            for tensor in x if isinstance(x, (list, tuple)) else (x,):
                if isinstance(tensor, Tensor):
                    tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return tensors
