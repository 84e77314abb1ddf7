from __future__ import annotations

from dataclasses import replace

import pytest

from profiling.bench import compare, report
from profiling.measure import record
from profiling.measure.machine import ROOT
from tests.profiling.fakes import SETTINGS, SMALL, FakePeer, FakeTimer, bench, cell, result, run

pytestmark = pytest.mark.usefixtures("few_calls")


def test_a_real_run_survives_the_file():
    timer = FakeTimer()

    def fill_with_nan(out):
        out.fill_(float("nan"))

    def fail(out):
        raise RuntimeError("no")

    peers = [
        FakePeer("cute_flash", timer, is_ours=True),
        FakePeer("sdpa-flash", timer, spoil=fill_with_nan),
        FakePeer("fa3", timer, spoil=fail),
    ]
    measured = bench(timer, peers, unavailable={"fa4": "no module"})
    assert measured.names == ("cute_flash", "sdpa-flash", "fa3") and measured.unavailable == {"fa4": "no module"}
    (one,) = measured.cells
    assert one.results["cute_flash"].round_ms == pytest.approx((1.0,) * 3)
    assert one.results["sdpa-flash"].accuracy["normal"].relative is None
    assert one.results["fa3"].error == "RuntimeError: no" and one.yardstick["normal"].relative


RESULTS = sorted((ROOT / "profiling" / "results").rglob("*-paper*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_of_earlier_days_can_be_read_reported_and_compared(path):
    earlier = record.load(path)
    is_backward = earlier.settings.get("direction") == "bwd"
    # Full and causal of each head dim, over six lengths. Only runs in (B, H, S, D) memory may have been cut off,
    # because no table shows their cells.
    assert earlier.is_complete or earlier.settings["layout"] == "bhsd"
    num_cells = 36 if earlier.is_complete else len(earlier.cells)
    assert len(report.cell_tables(earlier)) == -(-num_cells // 6) and 0 < num_cells <= 36
    table = report.accuracy_table(earlier)
    assert table is not None
    inputs = ["normal", "outliers"] if earlier.settings["outliers"] else ["normal"]
    names = [f"{name} {result}" for name in inputs for result in ("dk", "dq", "dv")] if is_backward else inputs
    assert list(table.columns[1::4]) == [f"{name}: Frobenius" for name in names]
    assert "-" not in {row[-1] for row in report.cell_tables(earlier)[0].rows}
    unchanged = compare.changes(earlier, earlier)
    assert len(unchanged) == num_cells and all(change.relative == 0.0 for change in unchanged)


def test_there_are_results_of_earlier_days():
    assert RESULTS


@pytest.mark.slow
def test_gradients_survive_the_file_and_are_not_compared_with_outputs():
    timer = FakeTimer()
    peers = [FakePeer("cute_flash", timer, is_ours=True), FakePeer("sdpa-flash", timer)]
    forward, backward = (bench(timer, peers, settings=replace(SETTINGS, direction=name)) for name in ("fwd", "bwd"))
    (cell,) = backward.cells
    assert cell.as_dict()["key"] == cell.key == f"bwd-bf16-{SMALL.id}" != forward.cells[0].key
    assert sorted(cell.results["cute_flash"].accuracy) == ["normal dk", "normal dq", "normal dv"]
    assert compare.changes(backward, forward) == []
    assert [change.relative for change in compare.changes(backward, backward)] == [0.0]


def test_entries_of_cells_have_the_same_keys():
    full, failed = (cell(cute_flash=one, sdpa_flash=result(250.0)).as_dict() for one in (result(500.0), result(None)))
    assert full["key"] == "fwd-bf16-d128-full-s512-b32h16" and full.keys() == failed.keys()
    assert full["results"]["cute_flash"].keys() == failed["results"]["cute_flash"].keys()


def test_a_file_of_another_schema_is_refused(tmp_path):
    path = tmp_path / "old.json"
    record.write_json({"schema": 0}, path)
    with pytest.raises(ValueError, match="schema 0"):
        record.load(path)
    assert list(tmp_path.iterdir()) == [path]


def changed(before: float | None, after: float | None, peer_after: float = 250.0):
    """Changes, and regressions at 5 %, for given TFLOP/s of cute_flash; the peer has 250, then `peer_after`."""
    base = run(cell(cute_flash=result(before), sdpa_flash=result(250.0)))
    now = run(cell(cute_flash=result(after), sdpa_flash=result(peer_after)))
    found = compare.changes(now, base)
    return found, [one for one in found if one.is_regression(0.05)]


def test_a_regression_is_found_and_an_improvement_is_not_one():
    for after, is_regression in [(500.0, False), (480.0, False), (470.0, True), (600.0, False)]:
        found, bad = changed(500.0, after)
        assert len(found) == 1 and bool(bad) == is_regression, after
    assert changed(500.0, 470.0)[1][0].relative == pytest.approx(-0.06)


def test_runs_are_compared_by_the_ratio_to_the_peer():
    assert changed(500.0, 400.0, peer_after=200.0)[1] == []
    assert changed(500.0, 500.0, peer_after=300.0)[1] != []


def test_a_cell_that_fails_now_is_a_regression_and_one_that_failed_before_is_none():
    found, bad = changed(500.0, None)
    assert found == bad and bad[0].after is None
    assert changed(None, 500.0) == ([], [])


def test_only_common_cells_with_the_peer_are_compared():
    base = run(cell(512, cute_flash=result(500.0), sdpa_flash=result(250.0)))
    other_length = run(cell(1024, cute_flash=result(1.0), sdpa_flash=result(250.0)))
    assert compare.changes(other_length, base) == []
    without_peer = run(cell(512, cute_flash=result(1.0), sdpa_flash=result(None)))
    assert compare.changes(without_peer, base) == []


def test_another_reference_is_looked_up_in_the_base():
    base = run(cell(cute_flash=result(500.0), sdpa_flash=result(250.0), fa3=result(1000.0)))
    now = run(
        cell(cute_flash=result(500.0), sdpa_flash=result(125.0), fa3=result(1000.0)), settings={"reference": "fa3"}
    )
    (change,) = compare.changes(now, base)
    assert (change.before, change.after) == (0.5, 0.5)
