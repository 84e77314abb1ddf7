"""`python -m profiling all`: the order of runs, resuming, a budget, failures; and that it has every run of the docs."""

import json
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from profiling import __main__ as command
from profiling.documents import doc_tables, every_run, figures, kernel_changes, sources
from profiling.documents.every_run import DONE, SKIPPED, Step, run_all
from profiling.measure.machine import ROOT

FACTS = {"date": "2026-01-31", "git_commit": "abc", "source_digest": "def"}
STEPS = (Step("a", "bench --graph", 10), Step("b", "decode", 20), Step("c", "fp32", 30))
TWO = (Step("a", "standard", 10, then="standard --bytes"),)


class Machine:
    """Runs take their expected time, and write a file at the commit of FACTS."""

    def __init__(self, status: dict[str, int] | None = None) -> None:
        self.time, self.status, self.ran = 0.0, status or {}, []

    def clock(self) -> float:
        return self.time

    def run(self, arguments: list[str], limit_s: float) -> tuple[int, str]:
        path = Path(arguments[arguments.index("--out") + 1])
        name = path.stem.removeprefix("2026-01-31-")
        self.ran.append((name, arguments[0], limit_s))
        self.time += next(step.seconds for step in STEPS if step.name == name)
        path.write_text(json.dumps({"machine": {"git_commit": FACTS["git_commit"]}}), encoding="utf-8")
        if name == "a":
            path.with_suffix(".txt").write_text("its own tables", encoding="utf-8")
            path.with_name(f"{path.stem}-ncu.csv").touch()
        return self.status.get(name, 0), "printed tables"


def outcomes(folder: Path, machine: Machine, budget_s: float | None = None, **facts: str) -> dict[str, str]:
    found = run_all(STEPS, folder, FACTS | facts, budget_s, machine.run, machine.clock)
    return {one.step.name: one.text for one in found}


def test_runs_in_order_with_twice_the_expected_time(tmp_path: Path) -> None:
    machine = Machine()
    assert set(outcomes(tmp_path, machine).values()) == {DONE}
    assert machine.ran == [("a", "bench", 20.0), ("b", "decode", 40.0), ("c", "fp32", 60.0)]
    names = sorted(path.name for path in tmp_path.glob("*.*"))
    files = [f"2026-01-31-{name}.{suffix}" for name in "abc" for suffix in ("json", "txt")]
    assert names == sorted([*files, "2026-01-31-a-ncu.csv", "kernels-abc.json"])
    texts = [(tmp_path / name).read_text() for name in names if name.endswith(".txt")]
    printed = "python -m profiling {}; commit abc, 2026-01-31\n\nprinted tables"
    assert texts == ["its own tables", printed.format("decode"), printed.format("fp32")]


def test_a_second_command_adds_to_the_same_file(tmp_path: Path) -> None:
    calls = []

    def run(arguments: list[str], limit_s: float) -> tuple[int, str]:
        calls.append(arguments)
        Path(arguments[-1]).write_text(json.dumps({"machine": FACTS}), encoding="utf-8")
        return len(calls) - 1, ""

    (outcome,) = run_all(TWO, tmp_path, FACTS, None, run)
    first, second = calls
    assert first[:-1] == ["standard", "--out"] and second[:-1] == ["standard", "--bytes", "--out"]
    assert first[-1] == second[-1] and outcome.text == "exit status 1, measured"
    assert (tmp_path / "2026-01-31-a.json").exists()


def test_a_second_call_resumes(tmp_path: Path) -> None:
    machine = Machine()
    assert outcomes(tmp_path, machine, budget_s=35.0) == {"a": DONE, "b": DONE, "c": "no time left"}
    assert outcomes(tmp_path, machine) == {"a": SKIPPED, "b": SKIPPED, "c": DONE}
    assert [name for name, *_ in machine.ran] == ["a", "b", "c"]


def test_runs_of_another_commit_are_repeated(tmp_path: Path) -> None:
    machine = Machine()
    outcomes(tmp_path, machine)
    assert outcomes(tmp_path, machine, git_commit="def")["a"] == DONE


def test_a_run_that_was_cut_off_has_no_result(tmp_path: Path) -> None:
    machine = Machine({"a": 124, "b": 1})
    assert outcomes(tmp_path, machine) == {"a": "exit status 124", "b": "exit status 1, measured", "c": DONE}
    assert not (tmp_path / "2026-01-31-a.json").exists() and (tmp_path / "2026-01-31-b.json").exists()
    assert outcomes(tmp_path, Machine())["a"] == DONE


def test_every_command_is_valid() -> None:
    for step in every_run.STEPS:
        for arguments in step.arguments(Path("x.json")):
            assert command._parser().parse_args(arguments).out == Path("x.json"), step.name


def test_the_documents_show_only_these_runs() -> None:
    """Besides files that no run of the list writes, such as the record of random calls."""
    files = {path for one in (*figures.FIGURES.values(), *doc_tables.BLOCKS.values()) for path in one.files}
    names = {Path(path).stem[len("2026-01-31-") :] for path in files if path.startswith(sources.RESULTS)}
    assert names - {"bwd-by-instruction", "ladder", "ladder-counters", "start", "support"} <= {
        step.name for step in every_run.STEPS
    }


def test_links_of_the_documents_name_the_newest_run() -> None:
    names = "|".join(step.name for step in every_run.STEPS)
    pattern = re.compile(rf"results/h200/\d{{4}}-\d\d-\d\d-(?:{names})\.(?:json|txt)\b")
    newest = {Path(sources.newest(step.name)).stem for step in every_run.STEPS}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    linked = {(page.name, Path(link).stem) for page in pages for link in pattern.findall(page.read_text("utf-8"))}
    assert len(linked) > 10
    assert {link for link in linked if link[1] not in newest} == set()


def test_the_runs_of_the_documents_have_the_kernels_of_one_commit(tmp_path: Path) -> None:
    """Runs of different commits are comparable only if their kernels have the same machine code.

    Kernels that the first commit did not have are those of a new study, which has no runs at other commits.
    """
    by_commit = doc_tables.steps_by_commit()
    kernels = {commit: sources.read(doc_tables.kernels_at(commit)) for commit in by_commit}
    (main, _newest), *others = by_commit.items()
    for commit, steps in by_commit.items():
        for step in steps:
            facts = json.loads((sources.DATA / sources.newest(step.name)).read_text("utf-8"))["machine"]
            assert facts["source_digest"] == kernels[commit]["source_digest"], step.name
    lock = tmp_path / "digests.json"
    lock.write_text(json.dumps(kernels[main]["digests"]))
    known = {name for digests in kernels[main]["digests"].values() for name in digests}
    for commit, steps in others:
        for step in steps:
            count, differ = kernel_changes.changed(kernels[commit], step.kernels, lock)
            assert count and not known.intersection(differ), f"{step.name} of {commit} and {main}"


def test_the_documents_name_the_commit_of_host_times() -> None:
    """Equal kernels do not show that host code is equal."""
    facts = json.loads((sources.DATA / sources.newest("host")).read_text("utf-8"))["machine"]
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    before_the_table = text[: text.index("<!-- made: host -->")].rpartition("\n## ")[2]
    assert f"`{facts['git_commit']}`" in before_the_table


def test_the_patterns_of_kernels_match_kernels() -> None:
    """The runs are on an H200, so their kernels are those of sm_90."""
    names = [name for digests in json.loads(kernel_changes.LOCK.read_text("utf-8")).values() for name in digests]
    for step in every_run.STEPS:
        for pattern in step.kernels:
            found = [name for name in names if fnmatchcase(name, pattern)]
            assert found and all("/sm_90/" in name for name in found), f"{step.name}: {pattern}"


def test_without_a_commit_there_is_no_file_of_kernels(tmp_path: Path) -> None:
    found = run_all(STEPS[:1], tmp_path, {**FACTS, "git_commit": None}, None, Machine().run, lambda: 0.0)
    assert [one.text for one in found] == [DONE] and not list(tmp_path.glob("kernels-*"))


def test_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["all", "--list", "--only", "decode,mods"]) == 0
    text = capsys.readouterr().out
    assert "python -m profiling decode" in text and "fp32" not in text
    assert command.main(["all", "--only", "nothing", "--list"]) == 2
    assert "choose from fwd-sm90-paper" in capsys.readouterr().err


def test_newest_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "DATA", tmp_path)
    (tmp_path / "results" / "x").mkdir(parents=True)
    for name in ("2026-01-31-run", "2026-02-01-run", "2026-03-01-run-graph", "2026-03-01-other-run"):
        (tmp_path / "results" / "x" / f"{name}.json").touch()
    assert sources.newest("run", "results/x") == "results/x/2026-02-01-run.json"
    with pytest.raises(FileNotFoundError, match="no run nothing"):
        sources.newest("nothing", "results/x")


@pytest.mark.slow
def test_commands_need_no_results() -> None:
    """Only `plots` reads the results of the repository, and draws."""
    readers = {"profiling.documents.sources", "matplotlib"}
    code = f"import sys, profiling.__main__; print(*sorted({readers} & {{*sys.modules}}))"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""


def test_a_run_that_exceeds_its_limit_is_stopped() -> None:
    assert every_run.run_process(["all", "--list"], 0.01) == (124, "\nstopped after 0.01 s")
