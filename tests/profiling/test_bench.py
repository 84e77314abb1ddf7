from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from profiling.bench import report
from profiling.bench.bench import STUDY
from profiling.measure.study import Record
from tests.profiling.fakes import SETTINGS, SMALL, FakePeer, FakeTimer, bench, failures, notes, settings_of, tools

pytestmark = pytest.mark.usefixtures("few_calls")


def test_speeds_ratios_and_errors_of_a_good_run():
    timer = FakeTimer()
    ours = FakePeer("cute_flash", timer, call_ms=0.5, is_ours=True)
    peers = [FakePeer("sdpa-flash", timer, 1.0), FakePeer("fa3", timer, 0.4, is_bshd=True)]
    run = bench(timer, [ours, *peers], settings=replace(SETTINGS, outliers=True))
    (cell,) = run.cells
    assert cell.results["cute_flash"].tflops == pytest.approx(SMALL.flops() / 0.5e-3 / 1e12)
    assert cell.results["cute_flash"].round_ms == pytest.approx((0.5,) * 3)
    assert cell.ratio("cute_flash", "sdpa-flash") == pytest.approx(2.0)
    assert run.best_peer(cell) == "fa3"
    for result in cell.results.values():
        assert result.error is None and not result.is_wrong and result.is_repeatable
        assert set(result.accuracy) == {"normal", "outliers"}
    # All three compute the same bits.
    assert cell.worst_error_ratio("cute_flash", "fa3") == 1.0
    assert cell.results["fa3"].accuracy["normal"].distance == 0.0
    assert run.is_complete and failures(run) == [] and notes(run) == []


def test_a_peer_that_fails_in_one_cell_is_recorded_there_and_runs_in_the_next():
    timer = FakeTimer()

    def refuse_causal(out):
        if out.shape[1] == SMALL.heads:
            raise NotImplementedError("causal is not here yet")

    shapes = [SMALL, replace(SMALL, heads=2, heads_kv=2)]
    ours = FakePeer("cute_flash", timer, is_ours=True, spoil=refuse_causal)
    run = bench(timer, [ours, FakePeer("sdpa-flash", timer)], shapes)
    first, second = run.cells
    assert first.results["cute_flash"].error == "NotImplementedError: causal is not here yet"
    assert first.results["cute_flash"].tflops is None and first.tflops("sdpa-flash")
    assert second.tflops("cute_flash") and second.results["cute_flash"].error is None
    (failure,) = failures(run)
    assert first.key in failure and "causal is not here yet" in failure


def test_cells_leave_out_peers_that_do_not_take_the_head_dim():
    timer = FakeTimer()
    shapes = [SMALL, replace(SMALL, head_dim=2 * SMALL.head_dim)]
    peers = [FakePeer("sdpa-flash", timer, head_dims=range(SMALL.head_dim + 1)), FakePeer("sdpa-efficient", timer, 3.0)]
    run = bench(timer, [FakePeer("cute_flash", timer, is_ours=True), *peers], shapes)
    first, second = run.cells
    assert set(first.results) == {"cute_flash", "sdpa-flash", "sdpa-efficient"}
    assert set(second.results) == {"cute_flash", "sdpa-efficient"}
    assert run.best_peer(second) == "sdpa-efficient" and second.worst_error_ratio("cute_flash", "sdpa-flash") is None
    assert report.cell_tables(run)[1].rows[0][2] == report.NOTHING
    assert failures(run) == [] and notes(run) == []


def test_a_wrong_peer_is_flagged_and_never_the_best_peer():
    timer = FakeTimer()

    def double(out):
        out *= 2

    fast_and_wrong = FakePeer("fa3", timer, 0.1, spoil=double)
    ours = FakePeer("cute_flash", timer, is_ours=True)
    run = bench(timer, [ours, FakePeer("sdpa-flash", timer, 2.0), fast_and_wrong])
    (cell,) = run.cells
    assert cell.results["fa3"].is_wrong and not cell.results["cute_flash"].is_wrong
    assert run.best_peer(cell) == "sdpa-flash"
    # A peer's wrong result is reported, but is not a failure of cute_flash.
    assert failures(run) == [] and "fa3: wrong" in notes(run)[0]


def test_ours_wrong_makes_the_run_fail():
    timer = FakeTimer()

    def forget_the_last_rows(out):
        out[:, :, -5:] = 0

    ours = FakePeer("cute_flash", timer, is_ours=True, spoil=forget_the_last_rows)
    run = bench(timer, [ours, FakePeer("sdpa-flash", timer)])
    assert "cute_flash: wrong on normal inputs" in failures(run)[0]


def test_a_race_is_seen():
    timer, calls = FakeTimer(), []

    def differ(out):
        calls.append(1)
        # Far below every tolerance.
        out[0, 0, 0, 0] += 0.01 * (len(calls) > 2)

    ours = FakePeer("cute_flash", timer, is_ours=True, spoil=differ)
    run = bench(timer, [ours, FakePeer("sdpa-flash", timer)])
    assert not run.cells[0].results["cute_flash"].is_wrong
    assert "other bits on the same inputs" in failures(run)[0]


def test_an_output_of_another_shape_is_an_error():
    timer = FakeTimer()
    # The peer claims that its output is (B, H, S, D), but it is not.
    liar = FakePeer("cute_flash", timer, is_ours=True, is_bshd=True)
    run = bench(timer, [type("Liar", (), {**_members(liar), "is_bshd": False})()])
    assert "out of shape (2, 300, 3, 16), expected (2, 3, 300, 16)" in failures(run)[0]


def _members(peer: FakePeer):
    names = ("name", "is_ours", "takes", "available", "context", "prepare")
    return {n: staticmethod(v) if callable(v := getattr(peer, n)) else v for n in names}


def test_inputs_that_do_not_fit_are_the_result_of_all(monkeypatch):
    timer, real = FakeTimer(), torch.randn

    def randn(size, **options):
        if len(size) == 4 and size[2] == 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(size, **options)

    monkeypatch.setattr(torch, "randn", randn)
    run = bench(timer, [FakePeer("sdpa-flash", timer)], [replace(SMALL, seqlen=1000), SMALL])
    assert run.cells[0].results["sdpa-flash"].error == "OutOfMemoryError: CUDA out of memory"
    assert run.cells[1].tflops("sdpa-flash")


def test_a_lost_device_stops_the_run_and_keeps_what_was_measured():
    timer, saved = FakeTimer(), list[Record]()

    def break_the_card(out):
        if out.shape[1] != SMALL.heads:
            timer.is_lost = True
            raise RuntimeError("illegal memory access")

    bad = FakePeer("cute_flash", timer, is_ours=True, spoil=break_the_card)
    shapes = (SMALL, replace(SMALL, heads=2, heads_kv=2), SMALL)
    chosen = settings_of([bad, FakePeer("sdpa-flash", timer)], shapes)
    record = STUDY.measure(chosen, tools(timer, save=saved.append))
    (cell,) = record["cells"]
    assert cell["results"]["cute_flash"]["tflops"] and saved[-1] == record
    assert not record["is_complete"] and STUDY.has_failed(record)
    assert record["stopped"].startswith(f"the CUDA context was lost at {shapes[1].id}: ")


def test_every_cell_is_saved_with_the_card_before_and_after():
    timer, saved, lines, states = FakeTimer(), list[tuple[int, bool]](), list[str](), iter(range(10))
    run = bench(
        timer,
        [FakePeer("sdpa-flash", timer)],
        [SMALL, SMALL],
        save=lambda record: saved.append((len(record["cells"]), record["is_complete"])),
        progress=lines.append,
        card_state=lambda: {"sample": next(states)},
    )
    assert saved == [(1, False), (2, False), (2, False), (2, True)]
    # The first and the last sample are those of the whole run.
    assert [(cell.before["sample"], cell.after["sample"]) for cell in run.cells] == [(1, 2), (2, 3)]
    assert [line.partition(":")[0] for line in lines] == [SMALL.id, SMALL.id, "the matrix product of all cells"]
    assert "sdpa-flash" in lines[0]


def test_the_l2_state_is_recorded_and_every_cell_times_the_matrix_product():
    timer = FakeTimer()
    run = bench(timer, [FakePeer("a", timer)], facts=lambda: {"l2_bytes": 1000})
    # Q, K, V and O in bf16, and the LSE in fp32.
    rows = SMALL.batch * SMALL.heads * SMALL.seqlen
    assert run.cells[0].working_set_bytes == rows * (4 * SMALL.head_dim * 2 + 4)
    assert run.cells[0].exceeds_l2 is True
    assert run.ceiling is not None and len(run.ceiling.round_ms) == len(run.cells) * SETTINGS.rounds
    (cell,) = run.cells
    assert cell.ceiling_tflops == run.ceiling.tflops and cell.ceiling_tflops is not None
    assert bench(timer, [FakePeer("a", timer)], facts=dict).cells[0].exceeds_l2 is None


@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_inputs_have_the_memory_layout_of_the_settings(layout):
    timer = FakeTimer()
    seen = []

    class Recorder(FakePeer):
        def prepare(self, q, k, v, causal):
            seen.extend((q, k, v))
            return super().prepare(q, k, v, causal)

    run = bench(timer, [Recorder("cute_flash", timer, is_ours=True)], settings=replace(SETTINGS, layout=layout))
    assert seen and failures(run) == []
    for x in seen:
        assert (x if layout == "bhsd" else x.transpose(1, 2)).is_contiguous()
        assert x.shape[1:] == (SMALL.heads, SMALL.seqlen, SMALL.head_dim)
