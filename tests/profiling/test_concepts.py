"""The figures and tables of docs/how-it-works.md and docs/mla.md agree with the models that they show."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from cute_flash.smem.tile import SmemTile
from cute_flash.spec.arch import SM_90
from profiling.documents import concept_tables, plot_concepts
from profiling.documents.timeline import COPY, TENSOR, Clocks, schedules
from profiling.studies import mla_cases


def test_a_row_ends_with_the_sum_of_its_exponentials() -> None:
    scores = plot_concepts.score_row()
    m, l, _ = plot_concepts.row_statistics(scores)[-1]
    assert m == scores.max() and l == pytest.approx(np.exp(scores - m).sum())
    assert sum(alpha < 1 for _, _, alpha in plot_concepts.row_statistics(scores)[1:]) == 4


def test_clocks_of_a_hopper_block() -> None:
    """The floors of profiling/notes/fwd_sm90.md: 2048 clocks of tensor cores for a block of 128 x 128 at D = 128."""
    assert 2 * Clocks(SM_90, 128, 128, 128).product == pytest.approx(2048, rel=1e-3)


def test_overlap_keeps_the_tensor_cores_busy() -> None:
    one_buffer, one_cta, two_ctas, hopper = (plot_concepts.busy(line) for line in schedules(64))
    assert one_buffer < one_cta < two_ctas == pytest.approx(1.0) and hopper == pytest.approx(1.0)


@pytest.mark.parametrize("line", schedules(8), ids=lambda line: line.title)
def test_no_unit_does_two_things_at_once(line) -> None:
    for row in {event.row for event in line.events}:
        events = sorted((event for event in line.events if event.row == row), key=lambda event: event.start)
        assert all(first.end <= second.start for first, second in pairwise(events))


@pytest.mark.parametrize("line", schedules(8), ids=lambda line: line.title)
def test_products_wait_for_their_operands(line) -> None:
    num_owners = 1 + max(event.owner for event in line.events)
    shares_copies = "TMA" in line.title
    ends = {(event.row == COPY, event.kind, event.block, event.owner): event.end for event in line.events}
    products = [event for event in line.events if event.row == TENSOR]
    assert len(products) == 2 * 8 * num_owners
    for event in products:
        operand = "K" if event.kind == "QK" else "V"
        assert event.start >= ends[True, operand, event.block, 0 if shares_copies else event.owner]
        if event.kind == "PV":
            assert event.start >= ends[False, "softmax", event.block, event.owner]


@pytest.mark.parametrize("variant, wavefronts", [("plain", list(range(8))), ("padded", [0] * 8), ("swizzled", [0] * 8)])
def test_a_column_of_a_tile(variant: str, wavefronts: list[int]) -> None:
    assert plot_concepts.column_read(SmemTile(8, 64, variant=variant))[1] == wavefronts


def test_memory_of_the_backward_is_linear() -> None:
    short, long = (plot_concepts.saved_bytes(length, 128) for length in (2048, 4096))
    assert long["recomputed"] == 2 * short["recomputed"] and long["workspace"] == 2 * short["workspace"]
    assert long["stored"] - long["recomputed"] == 2 * 4096**2


def test_tables() -> None:
    chips = {row[0]: row for row in concept_tables.chips().rows}
    assert [chips[gpu][-1] for gpu in ("A100", "H100", "H200")] == ["156", "295", "206"]
    shapes = {row[0]: row for row in concept_tables.shapes().rows}
    # S and P over Q, K, V and O: N / (2 d).
    assert [shapes[f"{n}, 64"][4] for n in concept_tables.LENGTHS] == ["4", "8", "16", "32", "64"]
    assert "| 4096, 64 |" in concept_tables.loop_orders()


def test_tiles_that_differ_from_the_rules_are_explained() -> None:
    """The page gives the reasons of these rows."""
    rows = [line.split(" | ") for line in concept_tables.tile_rules().splitlines()[2:]]
    differ = [row[0].removeprefix("| ") for row in rows if row[5] != row[6]]
    assert differ == ["A100, 64", "A100, 256", "H100, 128"]


def test_a_latent_row_is_the_cache_of_the_mla_study() -> None:
    assert plot_concepts.LATENT == mla_cases.VALUE_DIM and plot_concepts.KEY_DIM**-0.5 == mla_cases.SCALE
    assert plot_concepts.cached_numbers()["MLA"] == mla_cases.HEAD_DIM
