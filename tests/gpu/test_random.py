"""Random calls of both families over all features, against an oracle that shares no code with the package.

`--random-calls=N` runs N calls of each kind; 40 kinds of a family have the default of 45.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress

import pytest
import torch

from cute_flash.errors import UnsupportedError
from cute_flash.planning.launch import LaunchKey
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.family import FAMILIES, use_kernels
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.recording import RecordingGpu
from tests.random_calls import Call, Kind, attend, check, drawn, inputs_of, kinds, known_rng, results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::cute_flash.LayoutWarning"),
]
CALLS = 45
# The lengths of six calls of a kind reach three quarters of its kernels, in a tenth of the time of all.
RECORDED_CALLS = 6
KINDS = [pytest.param(kind, kind.family, id=kind.id) for family in FAMILIES for kind in kinds(family)]


@pytest.mark.parametrize(("kind", "family"), KINDS, indirect=["family"])
def test_random_calls(kind: Kind, family: str, request: pytest.FixtureRequest) -> None:
    check_kind(kind, request.config.getoption("--random-calls") or CALLS)


def check_kind(kind: Kind, num_calls: int) -> Counter[str]:
    """Check calls of a kind, and return how many had each outcome of `tests.random_calls.check`.

    Wrong calls are reported together; a kind is refused for all lengths, or for none. Each dimension of a bias that is
    not 1 adds operations per score, so a gradient may be refused with one bias and not with another.
    """
    failed, outcomes = [], defaultdict[tuple[bool, ...], Counter[str]](Counter)
    for seed in range(num_calls):
        call = drawn(seed, kind, "cuda")
        try:
            outcomes[dimensions_of_bias(call)][check(call, seed)] += 1
        except AssertionError as error:
            failed.append(f"seed {seed}: {call}: {error}")
    assert not failed, "\n".join([f"{len(failed)} failed", *failed[:5]])
    assert all(len(counts) == 1 for counts in outcomes.values()), outcomes
    return sum(outcomes.values(), Counter())


def dimensions_of_bias(call: Call) -> tuple[bool, ...]:
    """Whether each dimension of the bias is more than 1."""
    return tuple(size > 1 for size in call.leaves["bias"].shape) if "bias" in call.leaves else ()


def keys(arch: ArchSpec, families: Iterable[str]) -> Iterator[LaunchKey]:
    """The kernels of the first calls of all kinds."""
    for kind in itertools.chain.from_iterable(map(kinds, families)):
        yield from keys_of(kind, arch)


def keys_of(kind: Kind, arch: ArchSpec) -> list[LaunchKey]:
    """The kernels of the first calls of a kind, which are made with CPU tensors and launch nothing."""
    gpu = RecordingGpu(arch)
    with use_gpu(gpu), use_kernels(kind.family), claiming_cuda(), launching_operators():
        for seed in range(RECORDED_CALLS):
            call = drawn(seed, kind)
            x = inputs_of(call)
            with known_rng(x["q"].device), suppress(UnsupportedError):
                with torch.no_grad():
                    attend(call, x)
                results(attend, call, x, seed)
    return gpu.host_calls
