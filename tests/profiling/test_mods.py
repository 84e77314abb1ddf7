from __future__ import annotations

import fcntl
import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cute_flash import masks
from cute_flash.spec import arch
from profiling import __main__ as cli
from profiling.measure import study
from profiling.measure.gpu_lock import GpuLock
from profiling.measure.study import NOT_MEASURED, OK
from profiling.measure.workers import Outcome
from profiling.peers import fa4_mods
from profiling.studies import features, mods
from profiling.studies.features import Cell, CellCall, Sizes, measure_cells, ratio, through_autograd
from profiling.studies.mods import Settings
from tests.profiling.fakes import FakeTimer
from tests.profiling.fakes import tools as fake_tools

SMALL = Settings(head_dims=(8,), sizes=Sizes(hidden=16, batch=2, seqlen=24, long=40), rounds=2, ms=1.0)
CPU = torch.device("cpu")


def tools():
    return fake_tools(FakeTimer(event_ms=1.0))


def cells_of(settings):
    return [cell for cells in settings.groups(CPU).values() for cell in cells()]


def measured(*cells):
    return measure_cells(lambda: iter(cells), 2, 1.0, tools())


@pytest.fixture(autouse=True)
def without_fa4(monkeypatch, eager_flex):
    monkeypatch.setattr(fa4_mods, "missing", lambda: "ImportError: none here")


@pytest.mark.slow
def test_all_cells_run():
    record = mods.STUDY.measure(SMALL, tools())
    assert [cell["kind"] for cell in record["cells"]] == ["function"] * 12 + ["documents"] * 2 + ["bias"]
    for cell in record["cells"]:
        # Without compiling, FlexAttention on the CPU has no gradient.
        assert all(name == "flex bwd" for name in cell["errors"]), cell["errors"]
        assert len(cell["sides"]["fwd"]) >= 2
    rows = {row[0]: row[1:] for row in mods.summary(record).rows}
    assert rows["functions: cute_flash over flex"][0] == "12, 0"
    assert rows["documents: with a block mask over without a block mask"][0] == "2"
    assert len([name for name in rows if name.startswith("bias")]) == 5
    assert not any("fa4" in name for name in rows)


def test_peers_compute_the_same():
    for cell in cells_of(replace(SMALL, kinds=("function", "documents"))):
        first, *others = (call.prepare("fwd").call() for call in cell.calls.values())
        for other in others:
            torch.testing.assert_close(other, first, rtol=2e-2, atol=2e-2)


def test_what_is_measured_can_be_chosen(capsys):
    chosen = replace(SMALL, kinds=("function",), functions=("window", "alibi"), peers=("fa4",))
    cells = cells_of(chosen)
    assert [cell.name.split()[-1] for cell in cells] == ["window", "window", "alibi", "alibi"]
    assert all(list(cell.calls) == ["fa4", "cute_flash"] and cell.base == "fa4" for cell in cells)
    for option, known in (
        ("--functions", "alibi, capped"),
        ("--peers", "flex, fa4"),
        ("--kinds", "function, documents"),
    ):
        assert cli.main(("mods", option, "sigmoid")) == NOT_MEASURED
        assert f"{option} 'sigmoid': choose from {known}" in capsys.readouterr().err


def test_a_missing_fa4_is_left_out_unless_it_is_named(monkeypatch):
    assert mods.unavailable(SMALL) == {"fa4": "ImportError: none here"}
    named = replace(SMALL, kinds=("function",), peers=("fa4",), functions=("causal",))
    assert mods.unavailable(named) == {}
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    for cell in mods.STUDY.measure(named, tools())["cells"]:
        assert {*cell["errors"]} == {"fa4 fwd", "fa4 bwd"} and "flash_attn" in cell["errors"]["fa4 fwd"]
        assert {*cell["sides"]["fwd"]} == {*cell["sides"]["bwd"]} == {"cute_flash"}


def test_fa4_is_looked_for_but_not_imported(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert fa4_mods.missing()
    monkeypatch.delitem(sys.modules, "flash_attn")
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert fa4_mods.missing() is None


def _call(function):
    return CellCall(partial(through_autograd, function, (torch.arange(8.0).view(1, 1, 2, 4),)))


def _times(factor):
    return _call(lambda x: x * factor)


def test_a_peer_that_computes_something_else_is_not_timed():
    calls = {"wrong": _times(1.1), "right": _times(1.001), "ours": _times(1.0), "none": _times(float("nan"))}
    (found,) = measured(Cell("function", "x", calls, "right", "ours"))
    assert list(found["sides"]["fwd"]) == list(found["sides"]["bwd"]) == ["right", "ours"]
    assert found["errors"]["wrong fwd"] == "not timed: 0.1 away from ours"
    assert found["errors"]["none bwd"] == "not timed: inf away from ours"
    # Without `Cell.alike`, results are not compared, and all calls are timed.
    (found,) = measured(Cell("bias", "x", calls, "right"))
    assert len(found["sides"]["fwd"]) == 4 and not found["errors"]


def test_a_wrong_gradient_alone_leaves_the_forward():
    class Bent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    (found,) = measured(Cell("function", "x", {"bent": _call(Bent.apply), "ours": _times(1.0)}, "bent", "ours"))
    assert "bent" in found["sides"]["fwd"] and "bent" not in found["sides"]["bwd"]
    assert ratio(found, "ours", "fwd") is not None and ratio(found, "ours", "both") is None


# ---- FlashAttention-4's call
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [masks.causal(), masks.prefix_lm(100), masks.sliding_window(300)])
def test_block_indices_are_exact(mask, head_dim, direction):
    seqlen = 700
    (count, index, full_count, full_index), (rows, keys) = fa4_mods.block_indices(
        mask, torch.empty(1, 1, seqlen, head_dim), direction
    )
    assert {x.dtype for x in (count, index, full_count, full_index)} == {torch.int32}
    places = torch.arange(seqlen)
    dense = mask(0, 0, places[:, None], places[None, :])
    if direction == "bwd":
        dense, rows, keys = dense.T, keys, rows
    for i in range(count.shape[2]):
        partial = index[0, 0, i, : count[0, 0, i]].tolist()
        full = full_index[0, 0, i, : full_count[0, 0, i]].tolist()
        assert not {*partial} & {*full}
        for j in range(-(-seqlen // keys)):
            block = dense[i * rows : (i + 1) * rows, j * keys : (j + 1) * keys]
            # One that reaches past the end is never full.
            is_full = block.all() and block.shape == (rows, keys)
            assert (j in full) == is_full
            assert (j in partial) == (block.any() and not is_full)


def _fake_fa4(monkeypatch, spoil=1.0):
    """Install a fake FlashAttention-4, causal for any keywords; return the list of the keywords of each call."""
    seen = []

    def attend(q, k, v, **options):
        seen.append(options)
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(
            torch.ones(q.shape[2], q.shape[2]).triu(1) > 0, float("-inf")
        )
        return (weights.softmax(-1) @ v * spoil).transpose(1, 2).bfloat16(), None

    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    interface = SimpleNamespace(flash_attn_func=attend)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    lists = SimpleNamespace(BlockSparseTensorsTorch=lambda *tensors, block_size: (*tensors, block_size))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", lists)
    function = SimpleNamespace(options=lambda: {"mask_mod": "fa4 mask_mod"})
    monkeypatch.setattr(fa4_mods, "function", lambda name, *args: function)
    monkeypatch.setattr(fa4_mods, "missing", lambda: None)
    return seen


def test_fa4_gets_its_layout_and_its_block_indices(monkeypatch):
    seen = _fake_fa4(monkeypatch)
    sizes = replace(SMALL.sizes, hidden=128, seqlen=200, long=200)
    settings = replace(SMALL, kinds=("function",), head_dims=(64,), functions=("causal",), sizes=sizes)
    cell = cells_of(settings)[0]
    assert list(cell.calls) == ["flex", "fa4", "cute_flash"]
    (found,) = measured(cell)
    assert {*found["errors"]} == {"flex bwd"} and {*found["sides"]["bwd"]} == {"fa4", "cute_flash"}
    assert seen[0]["mask_mod"] == "fa4 mask_mod" and seen[0]["block_sparse_tensors"][-1] == (192, 128)
    assert "block_sparse_tensors_bwd" not in seen[0]
    (lists,) = (x["block_sparse_tensors_bwd"] for x in seen if "block_sparse_tensors_bwd" in x)
    assert lists[-1] == (128, 128)


def test_an_fa4_that_computes_something_else_is_reported(monkeypatch):
    _fake_fa4(monkeypatch, spoil=1.5)
    sizes = replace(SMALL.sizes, hidden=128)
    chosen = replace(SMALL, kinds=("function",), head_dims=(64,), functions=("causal",), peers=("fa4",), sizes=sizes)
    for cell in mods.STUDY.measure(chosen, tools())["cells"]:
        assert {*cell["sides"]["fwd"]} == {"cute_flash"} and "away from cute_flash" in cell["errors"]["fa4 fwd"]


def test_the_functions_can_be_made():
    """The functions are not traced, because that needs FlashAttention-4."""
    table, ids = torch.zeros(2, 256), torch.zeros(40, dtype=torch.int32)
    args = {"alibi": (0.5, -0.1), "capped": (20.0,), "relative": (table, 128), "document": (ids,)}
    args |= {"causal": (), "prefix": (1024,), "window": (1024,)}
    assert {*args} == {*mods.FUNCTIONS, "document"}
    for name, given in args.items():
        options = fa4_mods.function(name, *given).options()
        assert (options["mask_mod"] is None) == (options["score_mod"] is not None)
        assert (options["score_mod"] is None) == (options["score_mod_bwd"] is None)
        assert (options["aux_tensors"] is None) == (name not in ("relative", "document"))
    assert len(fa4_mods.function("document", ids).tensors[0]) >= 40 + 192


# ---- summary, processes, lock
# -------------------------------------------------------------------------------------------------------


def _record(kind, name, base, fwd, bwd):
    times = {
        direction: {call: {"ms": ms} for call, ms in one.items()} for direction, one in (("fwd", fwd), ("bwd", bwd))
    }
    return {"kind": kind, "name": name, "base": base, "sides": times, "errors": {}}


RUN = [
    _record("function", "D=64 a", "flex", {"flex": 2, "fa4": 1, "cute_flash": 1}, {"flex": 6, "cute_flash": 3}),
    _record("function", "D=128 b", "flex", {"flex": 8, "fa4": 4, "cute_flash": 1}, {"flex": 4, "cute_flash": 4}),
    _record(
        "documents",
        "D=64",
        mods.WITHOUT_BLOCK_MASK,
        {mods.WITHOUT_BLOCK_MASK: 6, mods.WITH_BLOCK_MASK: 1},
        {mods.WITHOUT_BLOCK_MASK: 6},
    ),
    _record("bias", "D=64", "plain", {"plain": 3, "bias of all": 4}, {"plain": 3, "bias of all": 6}),
]


def test_the_summary_is_of_geometric_means():
    assert mods.summary({"cells": RUN}).rows == (
        ("functions: cute_flash over flex", "2", "4.00 (2.00)", "1.41 (1.00)", "2.19 (2.00)"),
        ("functions: cute_flash over fa4", "2, 0", "2.00 (1.00)", "-", "-"),
        ("documents: with a block mask over without a block mask", "1, 0", "6.00 (6.00)", "-", "-"),
        ("bias of all over plain", "1", "0.75 (0.75)", "0.50 (0.50)", "0.60 (0.60)"),
    )


def test_processes_measure_different_groups(tmp_path, monkeypatch, capsys):
    """Every process has its own function and head dim; a lost process is an error."""
    tasks, lost = [], []

    class FakePool:
        def run(self, given):
            tasks.extend(given)
            # Processes end in any order.
            for index, task in reversed(list(enumerate(given))):
                assert task.function is mods.measure_group
                one, _ = task.args
                is_lost = bool(set(lost) & set(one.functions))
                name = f"D={one.head_dims[0]} {' '.join(one.functions)}".strip()
                cell = next({**cell, "name": name} for cell in RUN if cell["kind"] == one.kinds[0])
                yield Outcome(
                    index, None if is_lost else [cell], "its process ended with signal 9" if is_lost else None
                )

    @contextmanager
    def pool(size, environment, limit_s):
        pools.append(size)
        yield FakePool()

    pools: list[int] = []
    monkeypatch.setattr(mods, "Pool", pool)
    monkeypatch.setattr(arch, "has_gpu", lambda: True)
    monkeypatch.setattr(study, "Tools", lambda: fake_tools(FakeTimer()))
    out = tmp_path / "whole.json"
    assert cli.main(("mods", "--parallel", "--ms", "3", "--peers", "flex", "--out", str(out))) == OK
    names = [(cell["kind"], cell["name"]) for cell in json.loads(out.read_text())["cells"]]
    functions = [("function", f"D={d} {name}") for d in (64, 128) for name in mods.FUNCTIONS]
    assert names == [*functions, *((kind, f"D={d}") for kind in ("documents", "bias") for d in (64, 128))]
    settings, locks = zip(*(task.args for task in tasks))
    assert len(set(locks)) == 1 and len(set(settings)) == len(names) == pools[0]
    assert all((one.ms, one.peers) == (3.0, ("flex",)) for one in settings)
    assert "functions: cute_flash over flex" in capsys.readouterr().out
    lost.append("prefix")
    assert cli.main(("mods", "--parallel", "--head-dims", "64", "--kinds", "function")) == NOT_MEASURED
    assert "--parallel: function D=64 prefix: its process ended with signal 9" in capsys.readouterr().err


def test_a_process_compiles_its_kernels_then_measures_its_group(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(mods, "Tools", tools)
    monkeypatch.setattr(mods, "precompile_all", lambda keys, jobs: compiled.append((list(keys), jobs)) or [])
    (one, *_) = replace(SMALL, kinds=("bias",)).parts().values()
    (cell,) = mods.measure_group(one, tmp_path / "lock")
    assert cell["kind"] == "bias" and len(cell["sides"]["fwd"]) == 6 and compiled == [([], 1)]


def test_measuring_waits_until_no_process_compiles(tmp_path):
    mine, other = GpuLock(tmp_path / "lock"), (tmp_path / "lock").open()
    # Both compile at once, and neither measures.
    fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_UN)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with mine.exclusive(), pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other.close()


def test_with_a_lock_everything_is_compiled_before_anything_is_timed(tmp_path, monkeypatch):
    order: list[str] = []
    real = features.measure
    monkeypatch.setattr(features, "measure", lambda *args: order.append("time") or real(*args))
    monkeypatch.setattr(
        features, "_first_call", lambda *args, real=features._first_call: order.append("call") or real(*args)
    )
    for lock, expected in ((None, "ccttcctt"), (GpuLock(tmp_path / "lock"), "cccctttt")):
        order.clear()
        measure_cells(lambda: (Cell("function", x, {"a": _times(1.0)}, "a") for x in "xy"), 2, 1.0, tools(), lock)
        assert "".join(x[0] for x in order) == expected
