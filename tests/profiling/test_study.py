"""A study with one option and two steps: its options, record, files and exit status, without a GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

import cute_flash
from profiling.measure import launches, machine, options, study, tables, timing
from profiling.measure.options import LIMIT_S, ROUNDS, add_options, option, settings_of
from profiling.measure.study import FAILED, OK, CellFailure, Step, Study, Tools, target_arch
from profiling.measure.tables import Table
from tests.profiling.fakes import FakeTimer
from tests.profiling.fakes import tools as fake_tools


@dataclass(frozen=True)
class Settings:
    lengths: tuple[int, ...] = option((16, 32), "keys")
    names: tuple[str, ...] = option(("a",), choices=("a", "b", "c"))
    mask: str = option("full", choices=("full", "causal"))
    rounds: int = ROUNDS(3)
    is_fast: bool = option(False, "quick")
    limit_s: float = LIMIT_S(60.0)
    window: int = 1024

    def check(self) -> None:
        if min(self.lengths) < 1:
            raise ValueError("--lengths: 1 or more")


TOY = Study(
    name="toy",
    help="a toy",
    examples=("--lengths 8",),
    settings=Settings,
    check=Settings.check,
    kernels=lambda settings, tools: [f"kernel {n}" for n in settings.lengths],
    method={"time": "by hand"},
    parts=lambda settings, tools: {"cells": [], "errors": {}},
    steps=lambda settings, tools: [
        *(Step("cells", f"S = {n}", lambda n=n: {"seqlen": n, "us": 2 * n}) for n in settings.lengths),
        Step("errors", "errors", lambda: {"out": 0.5}),
    ],
    tables=lambda record: [Table("Toy", ("S", "us"), tuple((str(x["seqlen"]), str(x["us"])) for x in record["cells"]))],
    failures=lambda record: [
        CellFailure(f"S = {x['seqlen']}", "toy", "slow") for x in record["cells"] if x["us"] > 100
    ],
    notes=lambda record: ["a note"],
    small=Settings(lengths=(4,)),
)


def parsed(one: Study, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    one.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU whose calls run on the CPU; the compiled kernels."""
    compiled: list[str] = []
    facts = {"gpu": "NVIDIA H200", "torch": "2", "git_commit": "c", "source_digest": "d", "date": "today"}
    monkeypatch.setattr(study.arch, "has_gpu", lambda: True)
    monkeypatch.setattr(study, "precompile_keys", lambda keys, jobs: compiled.extend(keys))
    monkeypatch.setattr(study, "Tools", lambda: fake_tools(FakeTimer(), facts=lambda: facts))
    return compiled


def test_options_are_the_fields_of_the_settings():
    parser = argparse.ArgumentParser()
    add_options(parser, Settings)
    assert settings_of(Settings, parser.parse_args([])) == Settings()
    words = "--lengths 1,2 --names b,c --mask causal --rounds 5 --is-fast --limit-s 2".split()
    given = Settings((1, 2), ("b", "c"), "causal", 5, True, 2.0)
    assert settings_of(Settings, parser.parse_args(words)) == given
    # Only the options that are given replace those of a base.
    base = Settings(lengths=(7,), rounds=1, window=8)
    assert settings_of(Settings, parser.parse_args(["--rounds", "2"]), base) == replace(base, rounds=2)
    text = parser.format_help()
    assert "keys (default: 16,32)" in text and "--window" not in text
    with pytest.raises(ValueError, match="--names 'd': choose from a, b, c"):
        settings_of(Settings, parser.parse_args(["--names", "a,d"]))
    for wrong in (["--rounds", "0"], ["--mask", "left"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)


def test_the_record_is_saved_after_every_step():
    saved, lines = [], []
    run = fake_tools(FakeTimer(), save=lambda record: saved.append(json.dumps(record)), progress=lines.append)
    record = TOY.measure(Settings(), run)
    assert record["cells"] == [{"seqlen": 16, "us": 32}, {"seqlen": 32, "us": 64}] and record["errors"] == {"out": 0.5}
    assert record["settings"]["window"] == 1024 and record["method"] == {"time": "by hand"}
    assert record["machine"]["gpu"] == "fake" and set(record["card"]) == {"before", "after"}
    assert lines == ["S = 16", "S = 32", "errors"] and len(saved) == 4
    assert [json.loads(text)["is_complete"] for text in saved] == [False, False, False, True]


def test_steps_beyond_the_time_limit_are_left_out(capsys):
    # The clock is read once at the start and before each step; the second step is too late.
    clock = count(step=40.0)
    record = TOY.measure(Settings(), fake_tools(FakeTimer(), clock=lambda: next(clock)))
    assert len(record["cells"]) == 1 and record["left_out"] == ["S = 32", "errors"]
    assert TOY.report(record, None) == FAILED
    assert "S = 32: left out, the time was up" in capsys.readouterr().out


def test_the_command_compiles_measures_and_writes(gpu, tmp_path, capsys):
    out = tmp_path / "toy.json"
    assert TOY.run(parsed(TOY, "--lengths", "8", "--out", str(out))) == OK
    assert gpu == ["kernel 8"]
    assert json.loads(out.read_text())["is_complete"] and not out.with_suffix(".txt").exists()
    printed = capsys.readouterr().out
    assert "| 8 |" in printed and "a note" in printed and "Failures" not in printed


def test_a_study_with_its_own_file(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    assert replace(TOY, has_own_file=True).run(parsed(TOY)) == OK
    path = machine.default_path("toy", {"gpu": "NVIDIA H200"})
    assert path.parent.name == "h200" and json.loads(path.read_text())["is_complete"]
    text = path.with_suffix(".txt").read_text()
    assert text.startswith("gpu NVIDIA H200, torch 2, git_commit c") and "| 16 |" in text and "a note" in text
    assert machine.default_path("toy", {"gpu": None}).parent.name == "cpu"


def test_a_failure_decides_the_exit_status(gpu, capsys):
    assert TOY.run(parsed(TOY, "--lengths", "64")) == FAILED
    assert "S = 64, toy: slow" in capsys.readouterr().out
    # A peer may fail.
    assert replace(TOY, ours=("cute_flash",)).run(parsed(TOY, "--lengths", "64")) == OK


def test_wrong_settings_and_a_missing_gpu_are_refused_before_compiling(gpu, monkeypatch):
    with pytest.raises(ValueError, match="1 or more"):
        TOY.run(parsed(TOY, "--lengths", "0"))
    monkeypatch.setattr(study.arch, "has_gpu", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device: nothing can be measured; --dry-run"):
        TOY.run(parsed(TOY))
    assert not gpu


def test_a_dry_run_needs_no_gpu_and_writes_only_to_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    own = replace(TOY, has_own_file=True)
    assert own.run(parsed(own, "--dry-run", "--rounds", "2")) == OK
    assert not list(tmp_path.iterdir()) and "| 4 |" in capsys.readouterr().out
    out = tmp_path / "dry.json"
    own.run(parsed(own, "--dry-run", "--rounds", "2", "--out", str(out)))
    record = json.loads(out.read_text())
    assert record["is_dry_run"] and record["settings"]["lengths"] == [4] and record["settings"]["rounds"] == 2


def test_tools_of_a_dry_run_measure_wall_time():
    cpu = Tools.on_cpu()
    assert cpu.device == torch.device("cpu") and cpu.peak_bytes(lambda: None) is None
    assert cpu.timer.milliseconds(lambda: sum(range(1000))) > 0
    cpu.timer.synchronize()
    cpu.release()


def test_the_target_is_the_gpu_or_a_named_architecture(monkeypatch):
    monkeypatch.setattr(study.arch, "has_gpu", lambda: False)
    assert target_arch("sm_90", True, "--predict-only").name == "sm_90"
    for name, is_without in (("sm_90", False), (None, True)):
        with pytest.raises(ValueError, match="--predict-only"):
            target_arch(name, is_without, "--predict-only")


def test_the_example_of_the_readme(capsys):
    """A new study is one file: that of profiling/README.md runs in a dry run."""
    text = (machine.ROOT / "profiling" / "README.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"dataclass": dataclass, "partial": partial, "torch": torch, "cute_flash": cute_flash}
    for module in (launches, options, study, tables, timing):
        names |= vars(module)
    namespace = names | {"__name__": __name__}
    exec(f"from __future__ import annotations\n{code}", namespace)
    assert namespace["STUDY"].run(parsed(namespace["STUDY"], "--dry-run")) == OK
    assert "| 32 |" in capsys.readouterr().out
