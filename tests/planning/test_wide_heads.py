"""Head dims above 256: both families have forward and backward kernels, on every architecture.

`tests/gpu/test_wide_heads.py` runs them.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest
import torch

from cute_flash.errors import UnsupportedError
from cute_flash.planning.plan import plan_attention, plan_backward, plan_forward
from cute_flash.planning.tiles import AnyFwdTile
from cute_flash.planning.tiles.fwd_sm90 import SM90_FWD_WIDE, FwdTileSm90, FwdTileSm90Wide
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from cute_flash.spec.family import FAMILIES, use_kernels
from cute_flash.spec.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, MAX_HEAD_DIM_QK, Problem
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.recording import RecordingGpu
from tests.random_calls import Kind, attend, drawn, inputs_of, known_rng, results, wide_kinds

RUNNABLE = [(family, name) for family, runs_on in FAMILIES.items() for name, arch in ARCHS.items() if runs_on(arch)]
# Features whose scores need registers in the Hopper backward, and the pairs that it takes.
COSTLY, PAIRS = {"softcap", "alibi", "dropout"}, ({"softcap", "alibi"}, {"alibi", "dropout"})
# Of the listed random calls, score_mod captures tensors.
TENSORS = {"bias", "score_mod"}
runnable = pytest.mark.parametrize(("family", "name"), RUNNABLE)


@runnable
@pytest.mark.parametrize("features", [(), ("softcap", "alibi", "sinks", "dropout")], ids=["plain", "features"])
def test_every_head_dim_has_kernels(family: str, name: str, features: tuple[str, ...]) -> None:
    if family == "sm90":
        features = tuple(x for x in features if x != "dropout")
    for width in range(256 + HEAD_DIM_STEP, MAX_HEAD_DIM + 1, HEAD_DIM_STEP):
        for head_dim, head_dim_v in ((width, None), (width, 64), (64, width)):
            problem = Problem(1, 4, 2, 300, 700, head_dim, "bfloat16", Band(None, 0), head_dim_v, features)
            plans = [plan_forward(problem, ARCHS[name], family)]
            plans += [plan_backward(problem, ARCHS[name], is_ordered, family=family) for is_ordered in (False, True)]
            assert [plan.family for plan in plans] == [family] * 3
            assert all(plan.tile.head_dim >= max(head_dim, head_dim_v or 0) for plan in plans[1:])


@pytest.mark.parametrize("head_dim", range(MAX_HEAD_DIM + HEAD_DIM_STEP, MAX_HEAD_DIM_QK + 1, HEAD_DIM_STEP))
def test_wider_keys_have_a_forward_on_hopper_alone(head_dim: int) -> None:
    for queries in (1, 300):
        problem = Problem(1, 4, 2, queries, 3000, head_dim, "bfloat16", Band(None, 0), MAX_HEAD_DIM)
        assert plan_attention(problem, ARCHS["sm_90"]).main.kernel == "fwd_sm90_wide"
        with pytest.raises(UnsupportedError, match=r"no tile of sm80 for sm_80 .*; use torch's SDPA"):
            plan_attention(problem, ARCHS["sm_80"])
        with pytest.raises(
            UnsupportedError, match=f"the gradient of head_dim={head_dim}: at most 512; use torch's SDPA"
        ):
            plan_backward(problem, ARCHS["sm_90"])


HOPPER = ARCHS["sm_90"]


def hopper_tile(head_dim: int, head_dim_v: int | None = None, **fields: Any) -> AnyFwdTile:
    problem = Problem(1, 4, 2, 300, 700, head_dim, "bfloat16", fields.pop("band", Band()), head_dim_v, **fields)
    plan = plan_forward(problem, HOPPER, "sm90")
    assert plan.main.kernel == ("fwd_sm90_wide" if isinstance(plan.tile, FwdTileSm90Wide) else "fwd_sm90")
    return plan.tile


@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(5, None), Band(100, 100)], ids=str)
def test_rows_of_the_hopper_forward(band: Band) -> None:
    """Every row is taken, the narrowest first, and fits shared memory. Up to 320 a single CTA holds the output."""
    taken = []
    for d, dv in itertools.product(range(8, MAX_HEAD_DIM_QK + 1, HEAD_DIM_STEP), range(8, MAX_HEAD_DIM + 1, 24)):
        if max(d, dv) <= 256:
            continue
        row = hopper_tile(d, dv, band=band)
        assert row.head_dim >= d and row.width_v >= dv and row.fits(HOPPER)
        assert isinstance(row, FwdTileSm90) == (max(d, dv) <= 320)
        taken.append(row)
    taken += [hopper_tile(d, band=band) for d in range(264, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)]
    taken += [hopper_tile(264, features=(name,), band=band) for name in ("score_mod", "dropout")]
    assert {id(row) for row in taken} == {id(row) for row in SM90_FWD_WIDE}


@pytest.mark.parametrize(
    ("widths", "row"),
    [
        ((264, None), (288, 288)),
        ((288, None), (288, 288)),
        ((296, None), (320, 320)),
        ((320, None), (320, 320)),
        ((320, 256), (320, 256)),
        ((320, 64), (320, 256)),
        ((64, 264), (320, 320)),
        ((328, None), (384, 384)),
        ((264, 392), (320, 512)),
        ((320, 512), (320, 512)),
        ((328, 512), (448, 512)),
    ],
    ids=str,
)
def test_the_row_of_a_plain_call(widths: tuple[int, int | None], row: tuple[int, int]) -> None:
    tile = hopper_tile(*widths)
    assert (tile.head_dim, tile.width_v) == row


@pytest.mark.parametrize("head_dim", [264, 320])
@pytest.mark.parametrize("head_dim_v", [None, 128])
def test_features_that_would_spill_take_the_row_of_a_cluster(head_dim: int, head_dim_v: int | None) -> None:
    for features in ((), ("softcap", "alibi", "sinks", "return_max_logit"), ("score_mod",), ("softcap", "bias")):
        assert isinstance(hopper_tile(head_dim, head_dim_v, features=features), FwdTileSm90)
    for features in (("dropout",), ("score_mod", "mask_mod"), ("softcap", "alibi", "score_mod")):
        assert isinstance(hopper_tile(head_dim, head_dim_v, features=features), FwdTileSm90Wide)


def may_refuse(kind: Kind) -> bool:
    """Whether a family may refuse the gradients of such calls."""
    features = {*kind.features}
    costly = COSTLY & features
    is_costly = (len(costly) > 1 and costly not in PAIRS) or (kind.deterministic and "dropout" in features)
    return kind.family == "sm90" and (bool(TENSORS & features) or is_costly)


@runnable
def test_which_gradients_of_random_calls_are_refused(family: str, name: str) -> None:
    for kind in wide_kinds(family):
        call = drawn(0, kind)
        x = inputs_of(call)
        with use_gpu(RecordingGpu(ARCHS[name])), use_kernels(family), claiming_cuda(), launching_operators():
            with known_rng(x["q"].device), torch.no_grad():
                attend(call, x)
            with known_rng(x["q"].device), suppress(UnsupportedError):
                results(attend, call, x, 0)
                continue
        assert may_refuse(kind), kind.id


@pytest.mark.parametrize("head_dim", [264, 320, 328, 384, 392, 448, 512])
def test_the_default_backward_on_hopper(head_dim: int) -> None:
    problem = Problem(1, 4, 2, 300, 700, head_dim, "bfloat16", Band(None, 0))
    main = plan_backward(problem, ARCHS["sm_90"]).main
    assert main.kernel == "bwd_sm90_cluster"
    # The narrowest row, so that few columns are zeros.
    assert main.tile.head_dim == next(width for width in (320, 384, 512) if width >= head_dim)
