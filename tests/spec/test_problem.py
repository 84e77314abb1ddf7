"""Problems: the compiled-in part, and errors that name the argument, its value and an alternative."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from cute_flash.spec.band import Band
from cute_flash.spec.problem import CPU_DTYPES, GPU_DTYPES, Problem, Static, Support, UnsupportedError, check_head_dim

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
def test_every_documented_head_dim_and_dtype_passes(dtype: str) -> None:
    most = 128 if dtype == "float32" else 512
    for head_dim in range(8, most + 1, 8):
        changed(dtype=dtype, head_dim=head_dim).check("cuda")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 136}, "^head_dim=136 of float32 on cuda: at most 128; use bfl"),
        ({"head_dim": 130}, "head_dim=130 of float32 on cuda: at most 128"),
        ({"head_dim_v": 136}, "head_dim=136 of float32 on cuda: at most 128"),
        ({"head_dim": 100}, "head_dim=100: .* nearest is 104"),
        ({"head_dim": 512}, "head_dim=512 of float32 on cuda: at most 128"),
        ({"head_dim": 576, "head_dim_v": 512}, "head_dim=576 of float32 on cuda: at most 128"),
        ({"head_dim": 520}, "head_dim=520: .* SDPA"),
        ({"head_dim": 584, "head_dim_v": 512}, "head_dim=584: .* SDPA"),
    ],
)
def test_the_error_for_a_head_dim_of_fp32_names_one_that_fp32_supports(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        changed(dtype="float32", **fields).check("cuda")


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_the_cpu_takes_any_head_dim_and_four_dtypes(dtype: str) -> None:
    for head_dim in (0, 1, 7, 64, 257, 1000):
        changed(dtype=dtype, head_dim=head_dim).check("cpu")


@pytest.mark.parametrize(
    ("head_dim", "nearest"),
    [(0, 8), (1, 8), (7, 8), (9, 16), (63, 64), (65, 72), (100, 104), (255, 256), (257, 264), (511, 512)],
)
def test_head_dim_error_names_the_nearest_choice(head_dim: int, nearest: int) -> None:
    message = rf"head_dim={head_dim}: .* nearest is {nearest} \(pad q, k, v with zeros to it, and pass scale="
    for check in (partial(check_head_dim, head_dim), partial(changed(head_dim=head_dim).check, "cuda")):
        with pytest.raises(UnsupportedError, match=message):
            check()


@pytest.mark.parametrize(("head_dim", "advice"), [(516, "the nearest is 520"), (584, "use torch's SDPA")])
def test_the_error_for_wider_keys_says_which_kernel_takes_them(head_dim: int, advice: str) -> None:
    message = f"head_dim={head_dim}: .* from 8 to 512, and up to 576 in a forward on Hopper; {advice}"
    with pytest.raises(UnsupportedError, match=message):
        changed(head_dim=head_dim, head_dim_v=512).check("cuda")


@pytest.mark.parametrize("head_dim", [513, 520, 1024])
@pytest.mark.parametrize("name", ["head_dim", "head_dim_v"])
def test_no_split_of_the_heads_replaces_a_wide_head(head_dim: int, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"head_dim={head_dim}: .* 512; use torch's SDPA .* CPU") as raised:
        changed(**{name: head_dim}).check("cuda")
    assert "split" not in str(raised.value) and "nearest" not in str(raised.value)


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


def test_heads_of_q_are_a_multiple_of_those_of_k() -> None:
    for heads, heads_kv in ((1, 1), (4, 2), (6, 3), (8, 1), (0, 0), (0, 3)):
        changed(heads=heads, heads_kv=heads_kv).check("cuda")
    for heads, heads_kv in ((4, 3), (2, 4), (1, 2), (5, 0), (7, 6)):
        message = f"q has {heads} heads and k, v have {heads_kv}: .* multiple"
        with pytest.raises(ValueError, match=message) as error:
            changed(heads=heads, heads_kv=heads_kv).check("cuda")
        # A contradiction, so no kernel could support it.
        assert not isinstance(error.value, UnsupportedError)


def test_a_band_is_checked_with_its_problem() -> None:
    with pytest.raises(ValueError, match="window right=-1 is negative"):
        changed(band=Band(3, -1)).check("cpu")


@pytest.mark.parametrize("field", ["batch", "heads", "heads_kv", "seqlen_q", "seqlen_k"])
def test_negative_sizes(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}=-3 is negative$"):
        changed(**{field: -3}).check("cuda")


def test_support_is_as_true_as_its_answer() -> None:
    assert Support(True)
    refusal = Support(False, "because")
    assert not refusal
    assert refusal.reason == "because"
