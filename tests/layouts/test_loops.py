"""Both loop orders: results against the oracle, and HBM traffic against the formulas.

`test_loop_order` compares the bytes with those of the model, with masks too.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_flash import reference
from cute_flash.spec.band import Band
from layouts.studies.loops import tiled_kv_outer, tiled_q_outer
from tests.cases import FULL, Case, assert_is_attention, make_inputs

LOOP_ORDERS = [tiled_q_outer, tiled_kv_outer]


@pytest.mark.parametrize("tiled", LOOP_ORDERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    sides=st.tuples(*[st.none() | st.integers(0, 12)] * 2),
    tiles=st.tuples(st.integers(1, 20), st.integers(1, 20)),
)
def test_tiled_is_dense(tiled, lengths, heads, sides, tiles) -> None:  # type: ignore[no-untyped-def]
    (heads_q, heads_kv), (sq, sk) = heads, lengths
    case = Case(1, heads_q, heads_kv, sq, sk, 8, Band(*sides))
    q, k, v = make_inputs(case, torch.float64, seed=sum(lengths))
    out, lse, traffic = tiled(q, k, v, case.band, None, *tiles)
    oracle_out, oracle_lse = reference.dense(q, k, v, case.band)
    torch.testing.assert_close(out, oracle_out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, oracle_lse, rtol=1e-11, atol=1e-12)
    assert 0 <= traffic.block_rescales <= traffic.rescales
    assert 0 <= traffic.blocks_masked <= traffic.blocks_visited


@pytest.mark.parametrize("tiled", LOOP_ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tiled_in_low_precision(tiled, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    case = Case(2, 4, 2, 70, 90, 32, Band(40, 5))
    q, k, v = make_inputs(case, dtype)
    out, lse, _ = tiled(q, k, v, case.band, None, 16, 24)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_is_attention(out, lse, q, k, v, case.band)


@pytest.mark.parametrize(("dtype", "element", "statistic"), [(torch.float16, 2, 4), (torch.float64, 8, 8)])
def test_traffic_without_a_mask(dtype: torch.dtype, element: int, statistic: int) -> None:
    batch, heads, sq, sk, d, Br, Bc = 2, 4, 50, 70, 16, 16, 32
    q, k, v = make_inputs(Case(batch, heads, 2, sq, sk, d), dtype)
    Tr, Tc = 4, 3

    _, _, q_outer = tiled_q_outer(q, k, v, FULL, None, Br, Bc)
    assert q_outer.read_bytes == batch * heads * (sq + Tr * 2 * sk) * d * element
    assert q_outer.write_bytes == batch * heads * sq * (d * element + statistic)

    _, _, kv_outer = tiled_kv_outer(q, k, v, FULL, None, Br, Bc)
    q_and_o, m_and_l = 2 * d * element, 2 * statistic
    assert kv_outer.read_bytes == batch * heads * (2 * sk * d * element + Tc * sq * (q_and_o + m_and_l))
    assert kv_outer.write_bytes == batch * heads * Tc * sq * (d * element + m_and_l)

    for traffic in (q_outer, kv_outer):
        assert traffic.blocks_visited == batch * heads * Tr * Tc
        # The last of the three blocks has 6 keys of 32.
        assert traffic.blocks_masked == batch * heads * Tr


@pytest.mark.parametrize("tiled", LOOP_ORDERS)
@pytest.mark.parametrize(
    ("key_sizes", "rescales"),
    # Scores equal to the key's size: the maximum grows at each of the three later blocks, never, or once.
    [([1, 2, 3, 4], 3), ([4, 3, 2, 1], 0), ([2, 2, 2, 2], 0), ([3, 1, 5, 4], 1)],
)
def test_rescales(tiled, key_sizes: list[int], rescales: int) -> None:  # type: ignore[no-untyped-def]
    rows, Br, Bc = 6, 3, 2
    q = torch.ones(1, 1, rows, 1, dtype=torch.float64)
    k = torch.tensor(key_sizes, dtype=torch.float64).repeat_interleave(Bc).view(1, 1, -1, 1)
    _, _, traffic = tiled(q, k, k, FULL, 1.0, Br, Bc)
    assert traffic.rescales == rows * rescales
    assert traffic.block_rescales == (rows // Br) * rescales


def test_the_reference_forwards_the_loop_orders() -> None:
    assert (reference.tiled_q_outer, reference.tiled_kv_outer) == (tiled_q_outer, tiled_kv_outer)
    with pytest.raises(AttributeError, match="no attribute 'tiled_v_outer'"):
        _ = reference.tiled_v_outer
