from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from profiling.measure.record import write_json
from profiling.measure.timing import Samples
from profiling.studies import features
from profiling.studies.features import AutogradCall, Cell, CellResult, Settings, measure_cell, run_features
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.gpu import fake_gpu
from tests.profiling.fakes import FakeTimer

SMALL = Settings(
    head_dims=(8,),
    hidden=16,
    batch=2,
    seqlen=24,
    long=40,
    window=5,
    sequences=2,
    rounds=2,
    ms=1.0,
    pairs=((8, 8), (16, 8)),
)


@pytest.fixture
def short_sequences(monkeypatch):
    monkeypatch.setattr(features, "SHORTEST", 3)
    monkeypatch.setattr(features, "LONGEST", 20)


def test_all_cells_run_and_what_fails_is_reported(short_sequences, tmp_path, capsys):
    found = run_features(tuple(features.KINDS), SMALL, FakeTimer(event_ms=1.0), torch.device("cpu"))
    assert [one.kind for one in found] == ["feature"] * 2 + ["window"] + ["equal"] * 2 + ["ragged"] * 2 + [
        "head-dim"
    ] * 2
    for one in found:
        # FlashAttention-3 has no CPU path: its calls fail, and the others are measured all the same.
        assert all(name.startswith("fa3") for name in one.errors) and bool(one.errors) == (one.kind == "ragged")
        rest = {call for samples in one.samples.values() for call in samples}
        assert rest and len(one.samples["fwd"]) == len(one.samples["bwd"]) == len(rest)
    write_json(features.to_dict(found, SMALL, {"gpu": "none"}), tmp_path / "features.json")
    data = json.loads((tmp_path / "features.json").read_text())
    assert len(data["cells"]) == 9 and data["settings"]["rounds"] == 2
    shown = features.tables(found)
    assert [table.title for table in shown] == list(features.KINDS)
    assert [len(table.rows) for table in shown] == [10, 2, 4, 2, 20]


def test_sides_of_a_cell_compute_the_same(short_sequences):
    device = torch.device("cpu")
    for cell in features.equal_cells(SMALL, device):
        dense, varlen = (call.prepare("fwd").call() for call in cell.calls.values())
        torch.testing.assert_close(dense.reshape(varlen.shape), varlen)
    for cell in features.head_dim_cells(SMALL, device):
        out = {name: call.prepare("fwd").call() for name, call in cell.calls.items()}
        for name in ("deterministic", "varlen"):
            torch.testing.assert_close(out[name].reshape(out["plain"].shape), out["plain"])
        for name in ("softcap", "dropout", "alibi", "sinks", "score_mod", "bias"):
            assert not torch.equal(out[name], out["plain"]), name
        torch.testing.assert_close(out["bias_gradient"], out["bias"])
        gradients = {name: cell.calls[name].prepare("bwd").call() for name in ("bias", "bias_gradient")}
        for x, y in zip(gradients["bias"], gradients["bias_gradient"]):
            torch.testing.assert_close(x, y)
        assert len(gradients["bias"]) == 3 and gradients["bias_gradient"][3].abs().max() > 0
    cell = next(features.window_cells(SMALL, device))
    causal, window = (call.prepare("fwd").call() for call in cell.calls.values())
    torch.testing.assert_close(causal[:, :, :6], window[:, :, :6])
    assert not torch.equal(causal, window)


def test_ratios_are_those_of_times():
    found = CellResult("feature", "x", "plain")
    found.samples["fwd"] = {"plain": Samples(1, (2.0,)), "slow": Samples(1, (4.0,))}
    found.samples["bwd"] = {"plain": Samples(1, (6.0,)), "slow": Samples(1, (6.0,))}
    assert found.ratio("slow", "fwd") == 0.5 and found.ratio("slow", "bwd") == 1.0
    assert found.ratio("slow", "both") == 0.8
    assert found.ratio("absent", "both") is None
    assert list(found.rows())[1] == ("x: slow", "4.000", "6.000", "0.50", "1.00", "0.80")


def test_gradients_are_timed_without_the_forward_pass():
    calls = []

    def forward(x):
        calls.append(x.requires_grad)
        return x * 2

    cell = Cell("feature", "x", {"one": AutogradCall(forward, (torch.ones(2),))}, "one")
    found = measure_cell(cell, FakeTimer(event_ms=1.0), SMALL)
    assert calls.count(True) == 1 and calls.count(False) > 1
    assert not found.errors


def test_an_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="choose from feature"):
        run_features(("speed",), SMALL, FakeTimer(event_ms=1.0), torch.device("cpu"))


def test_lengths_are_the_same_every_time():
    assert features.ragged_lengths(SMALL) == features.ragged_lengths(SMALL)


def test_needed_kernels():
    """Only kernels of cute_flash are listed, each once, for both directions."""

    def other(q, k, v):
        return q * 2

    settings = replace(SMALL, pairs=((64, 64),), hidden=64)
    with fake_gpu("sm_90") as gpu, claiming_cuda(), launching_operators():
        cells = list(features.head_dim_cells(settings, torch.device("cpu")))
        keys = features.needed_kernels(cells)
        assert not gpu.launches
        peer = Cell("feature", "x", {"peer": AutogradCall(other, (torch.ones(2),) * 3)}, "peer")
        assert features.needed_kernels([peer]) == []
    tags = [set(key.static.tags) for key in keys if key.kernel == "fwd_sm90"]
    assert len(set(keys)) == len(keys)
    assert {"softcap", "alibi", "dropout"} <= set().union(*tags)
    assert any(key.kernel.startswith("bwd_sm90") for key in keys)
