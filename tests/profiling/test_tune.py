"""Tuning with fake kernels on the CPU in this process, and one real compilation in a separate process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from cute_flash import reference
from cute_flash.planning.plan import CompileKey, Plan
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec import arch
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from profiling import __main__ as cli
from profiling.bench.suites import Suite
from profiling.measure import machine
from profiling.measure.record import write_json
from profiling.measure.study import FAILED, NOT_MEASURED, OK
from profiling.measure.timing import describe
from profiling.measure.workers import Outcome, Task, Unusable
from profiling.tune import ranking, trial, tune
from profiling.tune.trial import Build
from profiling.tune.tune import Settings, run_tune
from profiling.tune.variants import FAMILIES, Variant, parse, table_rows
from tests.fakes.gpu import Present
from tests.fakes.kernels import kernel_of
from tests.profiling.fakes import CpuGpu, FakePeer, FakeTimer, tools

pytestmark = pytest.mark.usefixtures("few_calls")

FAMILY, HOPPER, ARCH = "fwd_sm80", "fwd_sm90", ARCHS["sm_90"]
GOOD, FAST, OTHER, NOTED = (parse(f"64x{n} w4 s1", FAMILY, 64) for n in (32, 48, 64, 80))
ROW = table_rows(FAMILY, 64, ARCH)[0]
SETTINGS = Settings(family=FAMILY, rounds=2, ms=2.0)


@dataclass
class World:
    """Fake kernels: correct, 1 ms per call. Other times and errors are given by the text of a variant."""

    timer: FakeTimer = field(default_factory=FakeTimer)
    call_ms: dict[str, float] = field(default_factory=dict)
    spoil: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = field(default_factory=dict)
    family: str = FAMILY
    spoil_gradient: dict[str, str] = field(default_factory=dict)  # "dq", "dk" or "dv"
    build_errors: dict[str, str] = field(default_factory=dict)
    built: list[tuple[str, bool]] = field(default_factory=list)
    compiled_keys: set[CompileKey] = field(default_factory=set)
    launched_keys: set[CompileKey] = field(default_factory=set)
    launched: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    last_note: str | None = None
    is_checking: bool = False

    @staticmethod
    def text(key: CompileKey) -> str:
        return Variant(key.kernel, key.static.head_dim, key.tile).text

    def precompile(self, key: CompileKey) -> bool:
        self.compiled_keys.update(key.keys)
        if key.kernel not in FAMILIES:
            return True
        text = self.text(key)
        self.built.append((text, key.static.has_right))
        if text in self.build_errors:
            raise RuntimeError(self.build_errors[text])
        return True

    def launch(self, key: CompileKey, operands: dict[str, Any]) -> None:
        self.launched_keys.add(key)
        if key.kernel.startswith("bwd"):
            self.launch_backward(key, operands)
            return
        text, band = self.text(key), Band(None, 0 if key.static.has_right else None)
        self.launched.append(text)
        self.timer.now_ms += self.call_ms.get(text, 1.0)
        q, k, v, out, lse = (operands[name] for name in ("q", "k", "v", "out", "lse"))
        # New memory holds NaN while a variant is checked.
        assert not self.is_checking or (out.isnan().all() and lse.isnan().all())
        exact = reference.forward(q, k, v, reference.plain_args(q, band, operands["scale"]))
        out.copy_(exact[0])
        lse.copy_(exact[1])
        self.spoil.get(text, lambda out, lse: None)(out, lse)

    def launch_backward(self, key: CompileKey, operands: dict[str, Any]) -> None:
        is_main = key.kernel in FAMILIES
        if is_main:
            text = self.text(key)
            self.launched.append(text)
            self.timer.now_ms += self.call_ms.get(text, 1.0)
        written = ("dk", "dv") if is_main else ("dq",) if "postprocess" in key.kernel else ("dq_accum", "delta")
        assert not self.is_checking or all(operands[name].isnan().all() for name in written)
        kernel_of(key.kernel)(key, Present(operands))
        if is_main or "postprocess" in key.kernel:
            spoil = self.spoil_gradient.get(Variant(self.family, key.static.head_dim, key.tile).text)
            if spoil in written:
                operands[spoil][:, :, -1].zero_()

    def note(self, text: str) -> None:
        self.last_note = text

    @contextmanager
    def progress(self, activity: str, total: int) -> Iterator[Callable[[str], None]]:
        yield self.lines.append

    @contextmanager
    def pool(self, size: int, environment: Any, limit_s: float) -> Iterator[World]:
        assert set(environment) == {"CUTE_FLASH_CACHE_DIR"}
        yield self

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Run the tasks as a pool, the last task first, because outcomes may come in any order."""
        for index, task in reversed(list(enumerate(tasks))):
            self.last_note, self.is_checking = None, task.function is trial.check
            try:
                outcome = Outcome(index, value=task.function(*task.args))
            except Unusable as error:
                # The process that replaces the lost one has a new context.
                self.timer.is_lost = False
                outcome = Outcome(index, None, str(error), self.last_note)
            except Exception as error:
                outcome = Outcome(index, None, describe(error), self.last_note)
            yield outcome

    def save(self, record: dict[str, Any]) -> None:
        self.saved.append(json.dumps(record, sort_keys=True, allow_nan=False))

    def tune(self, *variants: Variant, **settings: Any) -> ranking.Tuning:
        return run_tune(variants, ARCH, replace(SETTINGS, **settings), tools(self.timer, save=self.save))


@pytest.fixture
def world(monkeypatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(trial, "precompile", world.precompile)
    monkeypatch.setattr(trial, "note", world.note)
    monkeypatch.setattr(trial, "tools", lambda is_graph: tools(world.timer))
    monkeypatch.setattr(trial, "select", lambda names: [FakePeer(name, world.timer, 2.0) for name in names])
    monkeypatch.setattr(trial, "ODD_SHAPES", ((1, 2, 1, 90, 33), (1, 2, 2, 33, 33)))
    monkeypatch.setattr(tune, "Pool", world.pool)
    monkeypatch.setattr(tune, "steps", world.progress)
    monkeypatch.setitem(tune.SUITES, "quick", Suite(64, 128, (16, 32), (64,)))
    # Different in every real run.
    monkeypatch.setattr(trial.time, "perf_counter", lambda: 0.0)
    with use_gpu(CpuGpu(ARCH, world.launch)):
        yield world


def places(tuning: ranking.Tuning) -> list[tuple[str, float | None]]:
    return [(one.name, one.ratio) for one in tuning.standings(64)]


def entry_of(tuning: ranking.Tuning, variant: Variant) -> ranking.Entry:
    (entry,) = (entry for entry in tuning.entries if entry.variant == variant)
    return entry


def test_the_fastest_comes_first_and_the_ratio_is_to_the_reference(world):
    world.call_ms = {FAST.text: 0.5, GOOD.text: 4.0}
    tuning = world.tune(GOOD, FAST, ROW)
    assert places(tuning) == [
        (FAST.text, pytest.approx(4.0)),
        (ROW.text, pytest.approx(2.0)),
        ("sdpa-flash", 1.0),
        (GOOD.text, pytest.approx(0.5)),
    ]
    assert [cell.shape.id for cell in tuning.cells] == [
        "d64-full-s16-b4h2", "d64-full-s32-b2h2", "d64-causal-s16-b4h2", "d64-causal-s32-b2h2",
    ]  # fmt: skip
    (table,) = ranking.speed_tables(tuning)
    assert table.columns[:4] == ("variant", "x ref", "full 16", "full 32")
    assert [row[:2] for row in table.rows][:2] == [(FAST.text, "4.000"), (f"{ROW.text} *", "2.000")]
    # Registers were not requested; shared memory is always known.
    assert table.rows[0][-3:] == ("-", "-", f"{FAST.tile.smem_bytes / 1024:.0f}")
    assert tuning.is_complete and tuning.complaints() == []
    assert sorted(world.built) == sorted((v.text, c) for v in (GOOD, FAST, ROW) for c in (False, True))


def test_hopper_variants_are_tuned_by_default(world):
    assert Settings().family == HOPPER
    row, *_ = table_rows(HOPPER, 64, ARCH)
    slow, fast = (parse(text, HOPPER, 64) for text in ("64x64 s2", "128x80 s2 q2 t0"))
    world.call_ms = {fast.text: 0.5, slow.text: 4.0}
    tuning = world.tune(slow, fast, row, family=HOPPER)
    assert [name for name, _ in places(tuning)] == [fast.text, row.text, "sdpa-flash", slow.text]
    assert tuning.is_complete and tuning.complaints() == []
    first = ranking.to_dict(tuning)["variants"][0]
    assert (first["family"], first["accumulator_registers"]) == (HOPPER, 32 + 32 + 16)


def leave_out_the_last_row(out, lse):
    out[:, :, -1] = torch.nan


def forget_the_logarithm(out, lse):
    lse[lse.isfinite()] += 1.0


def give_empty_rows_a_value(out, lse):
    out[lse == -torch.inf] = 1e-3


@pytest.mark.parametrize("spoil", [leave_out_the_last_row, forget_the_logarithm, give_empty_rows_a_value])
def test_a_wrong_variant_is_marked_and_neither_timed_nor_ranked(world, spoil):
    world.call_ms, world.spoil = {FAST.text: 0.1}, {FAST.text: spoil}
    tuning = world.tune(GOOD, FAST)
    assert [name for name, ratio in places(tuning) if ratio] == [GOOD.text, "sdpa-flash"]
    assert all(FAST.text not in cell.results for cell in tuning.cells)
    wrong = entry_of(tuning, FAST)
    assert wrong.wrong is not None and wrong.wrong.startswith("b1h2kv") and wrong.error is None
    (table,) = ranking.speed_tables(tuning)
    assert table.rows[-1][:3] == (FAST.text, "WRONG", "-")
    assert tuning.complaints() == [f"{FAST}: WRONG: {wrong.wrong}"]


def test_a_wrong_variant_is_not_run_with_the_next_mask(world):
    world.spoil = {FAST.text: forget_the_logarithm}
    world.tune(FAST, masks=("full",))
    once = world.launched.count(FAST.text)
    world.launched.clear()
    world.tune(FAST, masks=("full", "causal"))
    assert world.launched.count(FAST.text) == once > 0


def test_other_bits_on_the_same_inputs_are_wrong(world):
    def drift(out, lse):
        # Far below any tolerance.
        out[0, 0, -1, 0] += 0.01 * (world.launched.count(FAST.text) % 2)

    world.spoil = {FAST.text: drift}
    assert "other bits" in (entry_of(world.tune(GOOD, FAST), FAST).wrong or "")


def test_what_is_wrong_only_on_the_timed_shape_is_not_ranked(world):
    def spoil(out, lse):
        if out.shape[0] == 2:
            out *= 1.1

    world.call_ms, world.spoil = {FAST.text: 0.1}, {FAST.text: spoil}
    tuning = world.tune(GOOD, FAST)
    assert entry_of(tuning, FAST).wrong == "fwd-bf16-d64-full-s32-b2h2: far from exact"
    assert places(tuning)[-1] == (FAST.text, None)
    # It is timed until its error is known.
    assert [FAST.text in cell.results for cell in tuning.cells] == [True, True, False, False]


def test_a_variant_that_does_not_compile_is_recorded_and_the_others_go_on(world):
    world.build_errors = {FAST.text: "ptxas fatal: out of registers"}
    tuning = world.tune(GOOD, FAST)
    error = "RuntimeError: ptxas fatal: out of registers"
    failed = entry_of(tuning, FAST)
    assert failed.builds == {mask: Build(error=error) for mask in ("full", "causal")}
    assert failed.error in (f"full: {error}", f"causal: {error}") and FAST.text not in world.launched
    assert places(tuning)[0] == (GOOD.text, pytest.approx(2.0))
    (table,) = ranking.speed_tables(tuning)
    assert table.rows[-1][:2] == (FAST.text, "failed")
    # Nothing can be timed: the peers are not timed alone.
    assert world.tune(FAST).cells == []


def test_a_variant_that_loses_the_device_is_named_and_the_cell_is_timed_without_it(world):
    def break_the_card(out, lse):
        if out.shape[0] == 4:
            world.timer.is_lost = True
            raise RuntimeError("an illegal memory access was encountered")

    world.spoil = {FAST.text: break_the_card}
    tuning = world.tune(GOOD, FAST, OTHER)
    first = tuning.cells[0]
    lost = "RuntimeError: an illegal memory access was encountered"
    assert first.results[FAST.text].error == lost
    assert first.tflops(GOOD.text) and first.tflops(OTHER.text) and first.tflops("sdpa-flash")
    assert entry_of(tuning, FAST).error == f"{first.key}: {lost}"
    assert [ratio is not None for _, ratio in places(tuning)] == [True, True, True, False]


def test_a_crash_while_it_is_checked_is_recorded(world):
    def refuse(out, lse):
        raise RuntimeError("too many resources requested for launch")

    def contradict(out, lse):
        # The launch fails, not the check of its results.
        raise AssertionError("the device is busy")

    world.spoil = {FAST.text: refuse, OTHER.text: contradict}
    tuning = world.tune(GOOD, FAST, OTHER)
    assert "while it was checked: RuntimeError: too many resources" in (entry_of(tuning, FAST).error or "")
    assert "AssertionError: the device is busy" in (entry_of(tuning, OTHER).error or "")
    assert entry_of(tuning, OTHER).wrong is None and entry_of(tuning, GOOD).is_right


def test_a_failure_without_a_culprit_is_the_result_of_the_cell(world, monkeypatch):
    def no_inputs(*args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(trial, "run_cell", no_inputs)
    tuning = world.tune(GOOD)
    assert tuning.cells[0].results[GOOD.text].error == "RuntimeError: no memory"
    assert tuning.cells[0].results["sdpa-flash"].error == "RuntimeError: no memory"
    assert places(tuning) == [("sdpa-flash", None), (GOOD.text, None)]


def test_the_file_is_written_after_every_step_and_stable(world, tmp_path):
    tuning = world.tune(GOOD, FAST)
    # After the builds, after the checks, after each of four cells, at the end.
    assert [len(json.loads(text)["cells"]) for text in world.saved] == [0, 0, 1, 2, 3, 4, 4]
    assert [json.loads(text)["is_complete"] for text in world.saved] == [False] * 6 + [True]
    assert sum("built in" in line for line in world.lines) == sum("right" in line for line in world.lines) == 4
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    write_json(ranking.to_dict(tuning), first)
    world.timer.now_ms = 0.0
    write_json(ranking.to_dict(world.tune(GOOD, FAST)), second)
    data = json.loads(first.read_text())
    assert sorted(data) == [
        "cells", "is_complete", "machine", "method", "peers", "schema", "settings", "unavailable", "variants",
    ]  # fmt: skip
    assert sorted(data["variants"][0]) == [
        "accumulator_registers", "builds", "error", "family", "geomean_ratio", "geomean_tflops", "head_dim",
        "is_table_row", "place", "smem_bytes", "tile", "variant", "wrong",
    ]  # fmt: skip
    assert [(v["variant"], v["wrong"], v["error"]) for v in data["variants"]] == [
        (str(GOOD), None, None),
        (str(FAST), None, None),
    ]
    # The same measurements give the same text.
    assert second.read_text() == first.read_text()


def test_compile_only_ranks_by_spills_and_then_by_registers(world, monkeypatch):
    uses = {GOOD.text: (168, 0), FAST.text: (128, 24), NOTED.text: (80, 0), OTHER.text: (96, 0)}

    def build(plan: Plan, stores_kernels: bool, reads_resources: bool) -> Build:
        assert reads_resources and not stores_kernels
        key = plan.main
        registers, spills = uses[world.text(key)]
        notes = ("C7512",) if world.text(key) == NOTED.text and key.static.has_right else ()
        return Build(1.0, registers + key.static.has_right, 0, spills, 2, notes)

    monkeypatch.setattr(trial, "build", build)
    tuning = world.tune(GOOD, FAST, NOTED, OTHER, compile_only=True)
    (table,) = ranking.resource_tables(tuning)
    assert [(*row[:3], row[-1]) for row in table.rows] == [
        (OTHER.text, "0", "96/97", "-"),
        (GOOD.text, "0", "168/169", "-"),
        (NOTED.text, "0", "80/81", "C7512"),
        (FAST.text, "24", "128/129", "-"),
    ]
    assert tuning.cells == [] and tuning.peers == () and world.launched == []


def test_the_command_shows_and_writes_the_ranking(world, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(arch, "has_gpu", lambda: True)
    monkeypatch.setattr(arch, "detect", lambda index: ARCH)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune, "split_available", lambda peers, direction: (peers[:1], {"fa3": "no folder"}))
    monkeypatch.setattr(machine, "card_state", dict)
    world.spoil = {FAST.text: leave_out_the_last_row}
    out = tmp_path / "tune.json"
    tiles = ("--tile", f"{GOOD};{FAST}", "--peers", "sdpa-flash,fa3", "--lengths", "16", "--masks", "causal")
    args = (*tiles, "--family", FAMILY, "--rounds", "2", "--ms", "2", "--out", str(out))
    assert cli.main(("tune", *args)) == FAILED
    printed = capsys.readouterr()
    assert "fwd_sm80 bf16, D=64" in printed.out and "| x ref | causal 16 |" in printed.out
    assert f"- {FAST}: WRONG: " in printed.out and "fa3 is not available: no folder" in printed.err
    data = json.loads(out.read_text())
    assert {"source_digest", "git_commit"} <= set(data["machine"])
    assert data["peers"] == ["sdpa-flash"] and data["unavailable"] == {"fa3": "no folder"}
    rows = table_rows(FAMILY, 64, ARCH, ("causal",))
    assert [v["variant"] for v in data["variants"] if v["is_table_row"]] == [str(row) for row in rows]
    assert [v["place"] is None for v in data["variants"]] == [False, False, True]


BACKWARD = {
    "bwd_sm80": (64, ("64x64 s1 w4 p2 k2 q2", "64x128 s2 p4 k4")),
    "bwd_sm90": (64, ("64x128", "128x128")),
    "bwd_sm90_wide": (256, ("64x64 p8", "64x48")),
}


@pytest.mark.parametrize("gradient", ["dq", "dk", "dv"])
@pytest.mark.parametrize("family", BACKWARD)
def test_variants_of_a_backward(world, monkeypatch, family, gradient):
    """The preprocess and postprocess kernels of a variant run too, and its gradients are checked."""
    head_dim, texts = BACKWARD[family]
    world.family = family
    fast, wrong = (parse(text, family, head_dim) for text in texts)
    monkeypatch.setitem(tune.SUITES, "quick", Suite(32, head_dim, (16,), (head_dim,)))
    world.call_ms = {fast.text: 0.5}
    world.spoil_gradient = {wrong.text: gradient}
    tuning = world.tune(fast, wrong, family=family, masks=("causal",))
    found = [(one.name, one.ratio) for one in tuning.standings(head_dim)]
    # The fake peer takes 2 ms.
    assert found[:2] == [(fast.text, pytest.approx(4.0)), ("sdpa-flash", 1.0)]
    assert entry_of(tuning, fast).complaint is None
    assert f": {gradient}: " in (entry_of(tuning, wrong).wrong or "")
    names = {key.kernel for key in world.launched_keys}
    assert names == {f"fwd_{family[4:8]}", "bwd_preprocess", family, f"bwd_postprocess_{family[4:8]}"}
    assert world.launched_keys <= world.compiled_keys
    assert tuning.method["flops"].startswith("10 B H S^2 D") and {cell.direction for cell in tuning.cells} == {"bwd"}


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("family", "arch"),
    [
        (FAMILY, "sm_80"),
        pytest.param(HOPPER, "sm_90", marks=pytest.mark.kernels("fwd_sm90")),
        pytest.param("bwd_sm90", "sm_90", marks=pytest.mark.kernels("bwd_sm90")),
    ],
)
def test_compile_only_for_real(family, arch, tmp_path, capsys, monkeypatch):
    """In a spawned process without a GPU, for `--arch`."""
    monkeypatch.setattr(machine, "facts", lambda: {"gpu": None})
    out = tmp_path / "tune.json"
    # The row itself: nothing else is compiled.
    (row,) = table_rows(family, 64, ARCHS[arch], ("full",))
    chosen = ("--family", family, "--arch", arch, "--tile", str(row), "--masks", "full")
    args = (*chosen, "--jobs", "1", "--out", str(out))
    assert cli.main(("tune", "--compile-only", *args)) == OK
    printed = capsys.readouterr()
    assert f"{row.text} *" in printed.out and "[1/1]" in printed.err
    (variant,) = json.loads(out.read_text())["variants"]
    assert variant["is_table_row"] and variant["variant"] == str(row) and variant["error"] is None
    build = variant["builds"]["full"]
    assert build["spill_bytes"] == 0 and build["ctas_per_sm"] >= 1 and build["notes"] == []
    # On Hopper these are the registers at launch, before setmaxnreg.
    assert build["registers"] <= 255 and (arch == "sm_90" or row.tile.accumulator_registers < build["registers"])


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--arch", "sm_90"), "use it with --compile-only"),
        (("--compile-only", "--arch", "sm_70"), "sm_70"),
        (("--compile-only", "--arch", "sm_80"), "family 'sm90' does not run on sm_80"),
        (("--compile-only", "--arch", "sm_90", "--tile", "64: 128x64"), "s (stages) missing"),
        (("--compile-only", "--arch", "sm_90", "--tile", "tiles.txt"), "nor a file"),
        (("--compile-only", "--arch", "sm_90", "--masks", "diagonal"), "diagonal"),
    ],
)
def test_mistakes_are_reported_before_anything_is_compiled(args, part, capsys, monkeypatch):
    monkeypatch.setattr(tune, "run_tune", lambda *args: pytest.fail("it began"))
    assert cli.main(("tune", *args)) == NOT_MEASURED
    assert part in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a GPU")
def test_without_a_gpu_it_says_what_can_be_done(capsys):
    assert cli.main(("tune",)) == NOT_MEASURED
    assert "--compile-only --arch" in capsys.readouterr().err
