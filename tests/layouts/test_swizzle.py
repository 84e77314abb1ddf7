from __future__ import annotations

import pytest
from cutlass import cute
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import Swizzle

deterministic = settings(derandomize=True, deadline=None, max_examples=100)


@st.composite
def swizzles(draw: st.DrawFn) -> Swizzle:
    bits = draw(st.integers(0, 4))
    return Swizzle(bits, draw(st.integers(0, 5)), draw(st.integers(bits, 6)))


@deterministic
@given(swizzles(), st.integers(0, 2**20))
def test_is_an_involution(swizzle: Swizzle, index: int) -> None:
    assert swizzle(swizzle(index)) == index


@deterministic
@given(swizzles(), st.integers(0, 2**20))
def test_changes_only_its_own_field(swizzle: Swizzle, index: int) -> None:
    changed = swizzle(index) ^ index
    assert changed % 2**swizzle.base == 0
    assert changed < swizzle.period


@pytest.mark.parametrize(
    ("swizzle", "index", "expected"),
    [
        # One row down (64 elements) moves to the next chunk (8 elements); each bit acts on its own partner.
        (Swizzle(3, 3, 3), 64, 64 + 8),
        (Swizzle(3, 3, 3), 3 * 64 + 5 * 8 + 7, 3 * 64 + 6 * 8 + 7),
        (Swizzle(3, 3, 3), 512, 512),
        # 64-byte rows: two rows fill the banks, so only every second row moves.
        (Swizzle(2, 3, 3), 32, 32),
        (Swizzle(2, 3, 3), 64, 64 + 8),
        (Swizzle(2, 3, 3), 256, 256),
        (Swizzle(2, 4, 5), 3 << 9, (3 << 9) + (3 << 4)),
        (Swizzle(0, 3, 3), 12345, 12345),
    ],
)
def test_known_values(swizzle: Swizzle, index: int, expected: int) -> None:
    assert swizzle(index) == expected


@pytest.mark.compiles
@pytest.mark.parametrize(("bits", "base", "shift"), [(3, 3, 3), (2, 3, 3), (3, 4, 3), (1, 2, 4)])
def test_is_that_of_cute(cute_indices, bits: int, base: int, shift: int) -> None:
    def build():
        return cute.make_composed_layout(cute.make_swizzle(bits, base, shift), 0, cute.make_layout(2048))

    indices, printed = cute_indices(build, 2048)
    assert indices == [Swizzle(bits, base, shift)(i) for i in range(2048)]
    assert printed.startswith(str(Swizzle(bits, base, shift)))


@pytest.mark.parametrize("fields", [(3, 3, 2), (-1, 3, 3), (2, -1, 3), (1, 1, -1)])
def test_rejects_bad_fields(fields: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"S<"):
        Swizzle(*fields)
