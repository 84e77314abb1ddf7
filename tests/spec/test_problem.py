"""Problems: the compiled-in part, and errors that name the argument, its value and an alternative."""

from __future__ import annotations

import dataclasses
import math

import pytest

from cute_flash.spec.band import Band
from cute_flash.spec.problem import (
    CPU_DTYPES,
    GPU_DTYPES,
    Problem,
    Static,
    Support,
    UnsupportedError,
    check_head_dim,
    check_heads,
    check_window,
)

GOOD = Problem(2, 4, 2, 100, 200, 64)


def changed(**fields: object) -> Problem:
    return dataclasses.replace(GOOD, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("band", "has_left", "has_right"),
    [(Band(), False, False), (Band(None, 0), False, True), (Band(0, None), True, False), (Band(7, 3), True, True)],
)
def test_static_is_dtype_head_dim_and_presence_of_bounds(band: Band, has_left: bool, has_right: bool) -> None:
    problem = Problem(3, 8, 4, 5, 6, 96, "float16", band)
    assert problem.static == Static("float16", 96, has_left, has_right)


def test_static_forgets_everything_that_is_known_at_run_time_only() -> None:
    other = Problem(7, 9, 3, 1, 4097, 64, band=Band(None, 0))
    assert other.static == changed(band=Band(None, 123)).static
    assert hash(other.static) == hash(changed(band=Band(None, 123)).static)
    for field, value in {"dtype": "float16", "head_dim": 72, "band": Band(1, None)}.items():
        assert changed(**{field: value}).static != GOOD.static, field


@pytest.mark.parametrize("field", ["batch", "heads", "seqlen_q", "seqlen_k"])
def test_empty_problems(field: str) -> None:
    assert not GOOD.is_empty
    assert changed(**{field: 0}).is_empty


@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_documented_head_dim_and_dtype_passes(dtype: str, head_dim: int) -> None:
    if dtype == "float32" and head_dim > 128:
        with pytest.raises(UnsupportedError, match=f"^head_dim={head_dim} of float32 on cuda: at most 128; use bfl"):
            changed(dtype=dtype, head_dim=head_dim).check("cuda")
        return
    changed(dtype=dtype, head_dim=head_dim).check("cuda")


def test_fp32_head_dims_name_a_choice_that_works() -> None:
    """The error for an fp32 head dim names a head dim that fp32 supports."""
    with pytest.raises(UnsupportedError, match="head_dim=130 of float32 on cuda: at most 128"):
        changed(dtype="float32", head_dim=130).check("cuda")
    with pytest.raises(UnsupportedError, match="head_dim=136 of float32 on cuda: at most 128"):
        changed(dtype="float32", head_dim_v=136).check("cuda")
    with pytest.raises(UnsupportedError, match=r"head_dim=100: .* nearest is 104"):
        changed(dtype="float32", head_dim=100).check("cuda")
    with pytest.raises(UnsupportedError, match=r"head_dim=264: .* nearest is 256"):
        changed(dtype="float32", head_dim=264).check("cuda")


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("head_dim", [0, 1, 7, 64, 257, 1000])
def test_the_cpu_takes_any_head_dim_and_four_dtypes(dtype: str, head_dim: int) -> None:
    changed(dtype=dtype, head_dim=head_dim).check("cpu")


@pytest.mark.parametrize(
    ("head_dim", "nearest", "remedy"),
    [
        (0, 8, "pad"), (1, 8, "pad"), (7, 8, "pad"), (9, 16, "pad"), (63, 64, "pad"), (65, 72, "pad"),
        (100, 104, "pad"), (255, 256, "pad"), (257, 256, "split"), (264, 256, "split"), (512, 256, "split"),
    ],
)  # fmt: skip
def test_head_dim_error_names_the_nearest_choice(head_dim: int, nearest: int, remedy: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"head_dim={head_dim}: .* nearest is {nearest} \({remedy} "):
        check_head_dim(head_dim)
    with pytest.raises(UnsupportedError, match=f"head_dim={head_dim}:"):
        changed(head_dim=head_dim).check("cuda")


@pytest.mark.parametrize(
    ("dtype", "device", "choices"),
    [
        ("float64", "cuda", "float16, bfloat16, float32"),
        ("int8", "cuda", "float16, bfloat16, float32"),
        ("int32", "cpu", "float16, bfloat16, float32, float64"),
        ("float8_e4m3fn", "cpu", "float16, bfloat16, float32, float64"),
    ],
)
def test_dtype_error_names_the_device_and_the_choices(dtype: str, device: str, choices: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^dtype {dtype} on {device}: use one of {choices}$"):
        changed(dtype=dtype).check(device)


@pytest.mark.parametrize(("heads", "heads_kv"), [(1, 1), (4, 2), (6, 3), (8, 1), (0, 0), (0, 3)])
def test_heads_that_divide(heads: int, heads_kv: int) -> None:
    check_heads(heads, heads_kv)
    changed(heads=heads, heads_kv=heads_kv).check("cuda")


@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 3), (2, 4), (1, 2), (5, 0), (7, 6)])
def test_heads_that_do_not_divide(heads: int, heads_kv: int) -> None:
    message = f"q has {heads} heads and k, v have {heads_kv}: .* multiple"
    with pytest.raises(ValueError, match=message) as error:
        changed(heads=heads, heads_kv=heads_kv).check("cuda")
    # A contradiction, so no kernel could support it.
    assert not isinstance(error.value, UnsupportedError)


@pytest.mark.parametrize("window", [(None, None), (0, 0), (None, 5), (5, None), [3, 4], (1 << 40, 0)])
def test_windows_that_are_right(window: tuple[int | None, int | None]) -> None:
    check_window(window)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ((-1, None), "window left=-1 is negative: use None"),
        ((None, -7), "window right=-7 is negative: use None"),
        ((-2, -3), "window left=-2"),
        ((1.5, None), "window left=1.5: use a whole number"),
        ((None, math.inf), "window right=inf: use a whole number of keys, or None"),
        ((1, 2, 3), r"window=\(1, 2, 3\): give \(left, right\)"),
        ((4,), r"window=\(4,\): give \(left, right\)"),
        (256, r"window=256: give \(left, right\)"),
        (None, r"window=None: give \(left, right\)"),
    ],
)
def test_window_error_names_the_side_and_the_value(window: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_window(window)  # type: ignore[arg-type]


def test_a_band_is_checked_with_its_problem() -> None:
    with pytest.raises(ValueError, match="window right=-1 is negative"):
        changed(band=Band(3, -1)).check("cpu")


@pytest.mark.parametrize("field", ["batch", "heads", "heads_kv", "seqlen_q", "seqlen_k"])
def test_negative_sizes(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}=-3 is negative$"):
        changed(**{field: -3}).check("cuda")


def test_unsupported_is_a_value_error() -> None:
    assert issubclass(UnsupportedError, ValueError)


def test_support_is_as_true_as_its_answer() -> None:
    assert Support(True)
    refusal = Support(False, "because")
    assert not refusal
    assert refusal.reason == "because"
