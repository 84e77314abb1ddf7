from __future__ import annotations

import fcntl
import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cute_flash import masks
from cute_flash.spec import arch
from profiling import __main__ as cli
from profiling.measure.gpu_lock import GpuLock
from profiling.measure.record import write_json
from profiling.measure.study import NOT_MEASURED, OK
from profiling.measure.timing import Samples
from profiling.peers import fa4_mods
from profiling.studies import features, mods
from profiling.studies.features import AutogradCall, Cell, CellResult, Settings, measure_cell, run_features
from tests.profiling.fakes import FakeTimer

SMALL = Settings(head_dims=(8,), hidden=16, batch=2, seqlen=24, long=40, rounds=2, ms=1.0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_fa4(monkeypatch, eager_flex):
    monkeypatch.setattr(fa4_mods, "missing", lambda: "ImportError: none here")


@pytest.mark.slow
def test_all_cells_run():
    found = run_features(tuple(mods.KINDS), SMALL, FakeTimer(event_ms=1.0), CPU, cells=mods.KINDS)
    assert [one.kind for one in found] == ["function"] * 12 + ["documents"] * 2 + ["bias"]
    for one in found:
        # Without compiling, FlexAttention on the CPU has no gradient.
        assert all(name == "flex bwd" for name in one.errors), one.errors
        assert len(one.samples["fwd"]) >= 2
    rows = {row[0]: row[1:] for row in mods.summary(found).rows}
    assert rows["functions: cute_flash over flex"][0] == "12, 0"
    assert rows["documents: with a block mask over without a block mask"][0] == "2"
    assert len([name for name in rows if name.startswith("bias")]) == 5
    assert not any("fa4" in name for name in rows)


def test_peers_compute_the_same():
    for make in (mods.function_cells, mods.document_cells):
        for cell in make(SMALL, CPU):
            first, *others = (call.prepare("fwd").call() for call in cell.calls.values())
            for other in others:
                torch.testing.assert_close(other, first, rtol=2e-2, atol=2e-2)


def test_what_is_measured_can_be_chosen():
    chosen = replace(SMALL, functions=("window", "alibi"), peers=("fa4",))
    cells = list(mods.function_cells(chosen, CPU))
    assert [cell.name.split()[-1] for cell in cells] == ["window", "alibi"] * 2
    assert all(list(cell.calls) == ["fa4", "cute_flash"] and cell.base == "fa4" for cell in cells)
    with pytest.raises(ValueError, match="choose from alibi, capped"):
        next(mods.function_cells(replace(SMALL, functions=("sigmoid",)), CPU))
    with pytest.raises(ValueError, match="choose from flex, fa4"):
        next(mods.document_cells(replace(SMALL, peers=("fa3",)), CPU))


def test_a_missing_fa4_is_left_out_unless_it_is_named(monkeypatch):
    assert mods.unavailable(SMALL) == {"fa4": "ImportError: none here"}
    named = replace(SMALL, peers=("fa4",), functions=("causal",))
    assert mods.unavailable(named) == {}
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    found = run_features(("function",), named, FakeTimer(event_ms=1.0), CPU, cells=mods.KINDS)
    for one in found:
        assert {*one.errors} == {"fa4 fwd", "fa4 bwd"} and "flash_attn" in one.errors["fa4 fwd"]
        assert {*one.samples["fwd"]} == {*one.samples["bwd"]} == {"cute_flash"}


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


def _times(factor):
    return AutogradCall(lambda x: x * factor, (torch.arange(8.0).view(1, 1, 2, 4),))


def test_a_peer_that_computes_something_else_is_not_timed():
    calls = {"wrong": _times(1.1), "right": _times(1.001), "ours": _times(1.0), "none": _times(float("nan"))}
    found = measure_cell(Cell("function", "x", calls, "right", "ours"), FakeTimer(event_ms=1.0), SMALL)
    assert list(found.samples["fwd"]) == list(found.samples["bwd"]) == ["right", "ours"]
    assert found.errors["wrong fwd"] == "not timed: 0.1 away from ours"
    assert found.errors["none bwd"] == "not timed: inf away from ours"
    # Without `Cell.alike`, results are not compared, and all calls are timed.
    found = measure_cell(Cell("bias", "x", calls, "right"), FakeTimer(event_ms=1.0), SMALL)
    assert len(found.samples["fwd"]) == 4 and not found.errors


def test_a_wrong_gradient_alone_leaves_the_forward():
    class Bent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    calls = {"bent": AutogradCall(Bent.apply, _times(1.0).inputs), "ours": _times(1.0)}
    found = measure_cell(Cell("function", "x", calls, "bent", "ours"), FakeTimer(event_ms=1.0), SMALL)
    assert "bent" in found.samples["fwd"] and "bent" not in found.samples["bwd"]
    assert found.ratio("ours", "fwd") is not None and found.ratio("ours", "both") is None


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
    settings = replace(SMALL, head_dims=(64,), hidden=128, functions=("causal",), seqlen=200, long=200)
    cell = next(mods.function_cells(settings, CPU))
    assert list(cell.calls) == ["flex", "fa4", "cute_flash"]
    found = measure_cell(cell, FakeTimer(event_ms=1.0), settings)
    assert {*found.errors} == {"flex bwd"} and {*found.samples["bwd"]} == {"fa4", "cute_flash"}
    assert seen[0]["mask_mod"] == "fa4 mask_mod" and seen[0]["block_sparse_tensors"][-1] == (192, 128)
    assert "block_sparse_tensors_bwd" not in seen[0]
    (lists,) = (x["block_sparse_tensors_bwd"] for x in seen if "block_sparse_tensors_bwd" in x)
    assert lists[-1] == (128, 128)


def test_an_fa4_that_computes_something_else_is_reported(monkeypatch):
    _fake_fa4(monkeypatch, spoil=1.5)
    settings = replace(SMALL, head_dims=(64,), hidden=128, functions=("causal",), peers=("fa4",))
    for one in run_features(("function",), settings, FakeTimer(event_ms=1.0), CPU, cells=mods.KINDS):
        assert {*one.samples["fwd"]} == {"cute_flash"} and "away from cute_flash" in one.errors["fa4 fwd"]


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


# ---- summary, parts, lock
# -------------------------------------------------------------------------------------------------------


def _result(kind, name, base, fwd, bwd):
    samples = {
        direction: {call: Samples(1, (ms,)) for call, ms in times.items()}
        for direction, times in (("fwd", fwd), ("bwd", bwd))
    }
    return CellResult(kind, name, base, samples)


RUN = [
    _result("function", "D=64 a", "flex", {"flex": 2, "fa4": 1, "cute_flash": 1}, {"flex": 6, "cute_flash": 3}),
    _result("function", "D=128 b", "flex", {"flex": 8, "fa4": 4, "cute_flash": 1}, {"flex": 4, "cute_flash": 4}),
    _result(
        "documents",
        "D=64",
        mods.WITHOUT_BLOCK_MASK,
        {mods.WITHOUT_BLOCK_MASK: 6, mods.WITH_BLOCK_MASK: 1},
        {mods.WITHOUT_BLOCK_MASK: 6},
    ),
    _result("bias", "D=64", "plain", {"plain": 3, "bias of all": 4}, {"plain": 3, "bias of all": 6}),
]


def test_the_summary_is_of_geometric_means():
    assert mods.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert mods.summary(RUN).rows == (
        ("functions: cute_flash over flex", "2", "4.00 (2.00)", "1.41 (1.00)", "2.19 (2.00)"),
        ("functions: cute_flash over fa4", "2, 0", "2.00 (1.00)", "-", "-"),
        ("documents: with a block mask over without a block mask", "1, 0", "6.00 (6.00)", "-", "-"),
        ("bias of all over plain", "1", "0.75 (0.75)", "0.50 (0.50)", "0.60 (0.60)"),
    )


def test_parts_make_a_whole(tmp_path, capsys):
    parts = []
    for i, one in enumerate(reversed(RUN)):
        settings = replace(SMALL, head_dims=(64,) if i else (128,), functions=("causal",) if i else ())
        write_json(features.to_dict([one], settings, {"gpu": "none"}), tmp_path / f"{i}.json")
        parts.append(str(tmp_path / f"{i}.json"))
    assert cli.main(("mods", "--parts", *parts, "--out", str(tmp_path / "whole.json"))) == OK
    assert "functions: cute_flash over flex" in capsys.readouterr().out
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert [cell["kind"] for cell in whole["cells"]] == ["function", "function", "documents", "bias"]
    assert [cell["name"] for cell in whole["cells"]][:2] == ["D=64 a", "D=128 b"]
    assert whole["settings"]["head_dims"] == [64, 128] and whole["machine"] == {"gpu": "none"}
    assert mods.summary(features.from_dict(whole)) == mods.summary(RUN)
    assert cli.main(("mods", "--parts", parts[0], parts[0])) == NOT_MEASURED
    assert "in common" in capsys.readouterr().err
    write_json(features.to_dict(RUN[1:2], replace(SMALL, seqlen=1), {}), tmp_path / "other.json")
    assert cli.main(("mods", "--parts", parts[0], str(tmp_path / "other.json"))) == NOT_MEASURED


def test_processes_measure_different_cells_and_are_merged(tmp_path, monkeypatch, capsys):
    """Every process has its own function and head dim; a lost process is an error."""
    monkeypatch.setattr(arch, "has_gpu", lambda: True)
    commands, lost = [], []

    def run_command(command, limit_s):
        args = cli._parser().parse_args(command[3:])
        commands.append(args)
        name = f"D={args.head_dims[0]} {' '.join(args.functions)}".strip()
        settings = replace(SMALL, head_dims=args.head_dims, functions=args.functions)
        one = next(replace(one, name=name) for one in RUN if one.kind == args.kinds[0])
        write_json(features.to_dict([one], settings, {"gpu": "none"}), args.out)
        return (137 if lost and lost[0] in args.functions else 0), "killed"

    monkeypatch.setattr(mods, "run_command", run_command)
    out = tmp_path / "whole.json"
    assert cli.main(("mods", "--parallel", "--ms", "3", "--peers", "flex", "--out", str(out))) == OK
    cells = [(cell["kind"], cell["name"]) for cell in json.loads(out.read_text())["cells"]]
    functions = [("function", f"D={d} {name}") for d in (64, 128) for name in mods.FUNCTIONS]
    assert sorted(cells) == sorted([*functions, *((k, f"D={d}") for k in ("documents", "bias") for d in (64, 128))])
    assert len({args.lock for args in commands}) == 1 and len({args.out for args in commands}) == len(cells)
    assert all((args.ms, args.jobs, args.peers) == (3.0, 1, ("flex",)) for args in commands)
    lost.append("prefix")
    assert cli.main(("mods", "--parallel", "--head-dims", "64", "--kinds", "function")) == NOT_MEASURED
    error = capsys.readouterr().err
    assert "--functions prefix: exit status 137: killed" in error and "1 of 6 processes did not end" in error


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
    cells = {"function": lambda settings, device: (Cell("function", x, {"a": _times(1.0)}, "a") for x in "xy")}
    saved: list[int] = []
    for lock, expected in ((None, "ccttcctt"), (GpuLock(tmp_path / "lock"), "cccctttt")):
        order.clear()
        run_features(
            ("function",),
            SMALL,
            FakeTimer(event_ms=1.0),
            CPU,
            cells=cells,
            lock=lock,
            save=lambda results: saved.append(len(results)),
        )
        assert "".join(x[0] for x in order) == expected
    assert saved == [1, 2, 1, 2]
