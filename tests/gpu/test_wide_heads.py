"""Head dims above 256 by both kernel families: random calls over all features, listed calls, and equal bits.

Random calls are compared with the oracle of `tests.definition`, which shares no code with the package. Listed calls
have more keys and more tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cute_flash
from cute_flash import reference
from cute_flash.errors import UnsupportedError
from cute_flash.planning.launch import LaunchKey
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.family import FAMILIES
from tests.cases import CAUSAL, FULL
from tests.combinations import VarlenCombination
from tests.covering import covering
from tests.feature_gradients import AnyCombination, assert_outputs
from tests.gpu.calls import (
    ALL,
    BF16,
    DTYPES,
    FP16,
    RAGGED,
    USED,
    WINDOW,
    Call,
    by_families,
    dense,
    few_properties,
    varlen,
)
from tests.gpu.test_attention import check
from tests.gpu.test_races import HEADS, options_of
from tests.gpu.test_random import check_kind, keys_of
from tests.random_calls import WIDE, Kind, wide_kinds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::cute_flash.LayoutWarning"),
]
RANDOM_CALLS = 30
KINDS = [pytest.param(kind, kind.family, id=kind.id) for family in FAMILIES for kind in wide_kinds(family)]
RUNS, LENGTH = 20, 1024


@pytest.mark.parametrize(("kind", "family"), KINDS, indirect=["family"])
def test_random_calls(kind: Kind, family: str, request: pytest.FixtureRequest) -> None:
    """sm80 refuses nothing, and sm90 no forward. `tests/planning/test_wide_heads.py` counts refused gradients."""
    outcomes = check_kind(kind, request.config.getoption("--random-calls") or RANDOM_CALLS)
    assert not outcomes["refused"] and (family == "sm90" or not outcomes["forward"]), outcomes


def _calls() -> list[Call]:
    """Many keys, several tiles of a persistent CTA, few queries of a group of heads, and all features together."""
    sizes = ((2, 300, 1200), (1, 1100, 1000), (8, 3, 700), (3, 197, 333))
    made: list[AnyCombination] = [
        dense(1, 2, group, rows, keys, d, dtype, band, features, dv)
        for (d, dv), dtype, band, features, (group, rows, keys) in itertools.product(
            WIDE, DTYPES, (FULL, CAUSAL, WINDOW), ({}, ALL), sizes
        )
    ]
    made += [dense(4, 10, 4, 300, 900, d, BF16, band) for d in (320, 512) for band in (FULL, CAUSAL)]
    made += [
        varlen(lengths, 2, 2, d, BF16, band, head_dim_v=dv)
        for (d, dv), lengths, band in itertools.product(WIDE, (RAGGED, USED), (FULL, CAUSAL))
    ]
    deterministic, fp32 = by_families(made[::5], deterministic=True), by_families(made[::11], out_fp32=True)
    # Every row of the tile tables for plain calls.
    rows = by_families(
        [dense(2, 2, 2, 300, 1200, d, BF16, band) for d in (288, 320, 384, 448, 512) for band in (FULL, WINDOW)]
    )
    return [*rows, *covering([*map(_supported, (*by_families(made), *deterministic, *fp32))], few_properties)]


def _supported(call: Call) -> Call:
    """The call, without dropout if family sm90 has no gradient of its features together."""
    if call.family != "sm90" or call.one.features != ALL:
        return call
    one = replace(call.one, features={name: value for name, value in ALL.items() if name != "dropout"})
    return replace(call, case=replace(call.case, one=one) if isinstance(call.case, VarlenCombination) else one)


CALLS = _calls()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id, indirect=True)
def test_gradients(call: Call, known_rng: None) -> None:
    """Deterministic gradients have the same bits in every repetition."""
    check(call, second_yardstick=True, repetitions=10)


# Only the Hopper forward has such keys, with values of up to 512 columns.
WIDEST_KEYS = [
    Call(dense(2, 2, group, rows, keys, d, dtype, band, features, dv), "sm90")
    for (d, dv), dtype, band, features, (group, rows, keys) in (
        ((576, 512), BF16, CAUSAL, {}, (2, 300, 1200)),
        ((576, 512), FP16, FULL, ALL, (1, 197, 333)),
        ((520, 264), BF16, WINDOW, {}, (8, 3, 700)),
        ((576, 64), BF16, CAUSAL, {"softcap": 5.0}, (4, 1100, 1000)),
    )
]


@pytest.mark.parametrize("call", WIDEST_KEYS, ids=lambda call: call.id, indirect=True)
def test_forward_of_wider_keys(call: Call, known_rng: None) -> None:
    x = call.tensors()
    exact, rough = (call.case.dense(by, x) for by in (reference.dense, reference.dense_low_precision))
    assert_outputs(call.attend(x), exact, rough)
    with pytest.raises(UnsupportedError, match="the gradient of head_dim="):
        call.attend({name: tensor.requires_grad_() for name, tensor in x.items()})


REPEATED = covering(
    list(
        itertools.product(
            FAMILIES, ("", "dropout", "softcap", "alibi"), ((320, 320), (512, 512), (512, 256)), (False, True)
        )
    ),
    tuple,
)


@pytest.mark.parametrize(("family", "feature", "widths", "causal"), REPEATED, indirect=["family"])
def test_repeated_calls_have_equal_bits(
    family: str, feature: str, widths: tuple[int, int], causal: bool, known_rng: None
) -> None:
    """The output, dk and dv, which no atomic additions sum, and all deterministic gradients."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(width: int) -> Tensor:
        return torch.randn(2, HEADS, LENGTH, width, generator=generator, device="cuda", dtype=BF16)

    (d, dv), options = widths, options_of(feature, None)
    q, k, v = (normal(width).requires_grad_() for width in (d, d, dv))
    dout, first, different = normal(dv), None, 0
    for _ in range(RUNS):
        out = cute_flash.attn(q, k, v, causal=causal, **options)
        ordered = cute_flash.attn(q, k, v, causal=causal, deterministic=True, **options)
        found = [out.detach(), *torch.autograd.grad(out, (k, v), dout), *torch.autograd.grad(ordered, (q, k, v), dout)]
        first = first or found
        different += not all(torch.equal(x, y) for x, y in zip(found, first, strict=True))
    assert not different, f"{different} of {RUNS} calls differ from the first"


def keys(arch: ArchSpec, families: Iterable[str]) -> Iterator[LaunchKey]:
    """The kernels of all calls; a call that is refused has none, and its test fails."""
    runnable = list(families)
    for kind in itertools.chain.from_iterable(map(wide_kinds, runnable)):
        yield from keys_of(kind, arch)
    for call in WIDEST_KEYS if "sm90" in runnable else ():
        yield from call.keys(arch, has_gradients=False)
    for call in (*CALLS, *itertools.starmap(_repeated_call, itertools.product(REPEATED, (False, True)))):
        if call.family in runnable:
            with suppress(UnsupportedError):
                yield from call.keys(arch)


def _repeated_call(repeated: tuple[str, str, tuple[int, int], bool], deterministic: bool) -> Call:
    """A call of `test_repeated_calls_have_equal_bits`."""
    family, feature, (d, dv), causal = repeated
    features = {feature: {"dropout": 0.2, "softcap": 20.0}.get(feature, 1)} if feature else {}
    band = CAUSAL if causal else FULL
    case = dense(2, HEADS, 1, LENGTH, LENGTH, d, BF16, band, features, dv)
    return Call(case, family, deterministic=deterministic)
