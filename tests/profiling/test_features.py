from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch

from profiling.studies import features
from profiling.studies.features import Cell, CellCall, Settings, Sizes, measure_cells, ratio, through_autograd
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.gpu import fake_gpu
from tests.profiling.fakes import FakeTimer, tools

SIZES = Sizes(hidden=16, batch=2, seqlen=24, long=40, window=5, sequences=2, pairs=((8, 8), (16, 8)))
SMALL = Settings(head_dims=(8,), sizes=SIZES, rounds=2, ms=1.0)
CPU = torch.device("cpu")


@pytest.fixture
def short_sequences(monkeypatch):
    monkeypatch.setattr(features, "SHORTEST", 3)
    monkeypatch.setattr(features, "LONGEST", 20)


@pytest.mark.slow
def test_all_cells_run_and_what_fails_is_reported(short_sequences):
    record = features.STUDY.measure(SMALL, tools(FakeTimer(event_ms=1.0)))
    cells = json.loads(json.dumps(record, allow_nan=False))["cells"]
    kinds = {"feature": 2, "window": 1, "equal": 2, "ragged": 2, "head-dim": 2}
    assert [cell["kind"] for cell in cells] == list(chain(*([kind] * count for kind, count in kinds.items())))
    for cell in cells:
        # FlashAttention-3 has no CPU path: its calls fail, and the others are measured all the same.
        assert all(name.startswith("fa3") for name in cell["errors"]) and bool(cell["errors"]) == (
            cell["kind"] == "ragged"
        )
        assert cell["sides"]["fwd"].keys() == cell["sides"]["bwd"].keys() != set()
    shown = features.tables(record)
    assert [(table.title, len(table.rows)) for table in shown] == list(zip(kinds, (10, 2, 4, 2, 20)))
    assert features.STUDY.has_failed(record) and "fa3 fwd: " in str(features.failures(record)[0])


def test_sides_of_a_cell_compute_the_same(short_sequences):
    for cell in features.equal_cells(SIZES, 0, CPU, 8):
        dense, varlen = (call.prepare("fwd").call() for call in cell.calls.values())
        torch.testing.assert_close(dense.reshape(varlen.shape), varlen)
    for cell in (cell for pair in SIZES.pairs for cell in features.head_dim_cells(SIZES, 0, CPU, pair)):
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
    cell = next(features.window_cells(SIZES, 0, CPU, 8))
    causal, window = (call.prepare("fwd").call() for call in cell.calls.values())
    torch.testing.assert_close(causal[:, :, :6], window[:, :, :6])
    assert not torch.equal(causal, window)


def test_ratios_are_those_of_times():
    times = {"fwd": {"plain": {"ms": 2.0}, "slow": {"ms": 4.0}}, "bwd": {"plain": {"ms": 6.0}, "slow": {"ms": 6.0}}}
    cell = {"kind": "feature", "name": "x", "base": "plain", "sides": times, "errors": {}}
    assert [ratio(cell, "slow", direction) for direction in ("fwd", "bwd", "both")] == [0.5, 1.0, 0.8]
    assert ratio(cell, "absent", "both") is None
    (table,) = features.tables({"cells": [cell]})
    assert table.rows[1] == ("x: slow", "4.000", "6.000", "0.50", "1.00", "0.80")


def test_gradients_are_timed_without_the_forward_pass():
    calls = []

    def forward(x):
        calls.append(x.requires_grad)
        return x * 2

    cell = Cell("feature", "x", {"one": CellCall(partial(through_autograd, forward, (torch.ones(2),)))}, "one")
    (found,) = measure_cells(lambda: iter([cell]), 2, 1.0, tools(FakeTimer(event_ms=1.0)))
    assert calls.count(True) == 1 and calls.count(False) > 1
    assert not found["errors"]


def test_lengths_are_the_same_every_time():
    assert features.ragged_lengths(SIZES, 0) == features.ragged_lengths(SIZES, 0)


def test_needed_kernels():
    """Only kernels of cute_flash are listed, each once, for both directions."""
    sizes = replace(SIZES, pairs=((64, 64),), hidden=64)
    settings = replace(SMALL, kinds=("head-dim",), sizes=sizes)
    with fake_gpu("sm_90") as gpu, claiming_cuda(), launching_operators():
        keys = features.kernels_of(settings.groups(CPU))
        assert not gpu.launches
        peer = CellCall(partial(through_autograd, lambda q, k, v: q * 2, (torch.ones(2),) * 3))
        assert features.kernels_of({"x": lambda: iter([Cell("feature", "x", {"peer": peer}, "peer")])}) == []
    tags = [set(key.static.tags) for key in keys if key.kernel == "fwd_sm90"]
    assert len(set(keys)) == len(keys)
    assert {"softcap", "alibi", "dropout"} <= set().union(*tags)
    assert any(key.kernel.startswith("bwd_sm90") for key in keys)
