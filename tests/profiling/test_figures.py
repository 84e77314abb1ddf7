"""The figures and the tables of the documents agree with the checked-in result files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.metadata import version
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from profiling import __main__ as cli
from profiling.counters.ncu_case import Case
from profiling.counters.ncu_metrics import METRICS
from profiling.documents import doc_results, doc_tables, figures, plot_counters, plot_speed
from profiling.documents.figures import FIGURES
from profiling.documents.plot_style import BLUE, LOOKS, PURPLE, RED, style, svg
from profiling.measure.machine import PLOTS, ROOT
from profiling.measure.record import load
from profiling.measure.shapes import Shape
from profiling.measure.study import NOT_MEASURED, OK

PERFORMANCE = ROOT / "docs" / "performance.md"
# Another version of matplotlib places the same data and texts a little differently.
IS_PINNED = f"matplotlib=={version('matplotlib')};" in (ROOT / "constraints.txt").read_text()


def texts(drawn: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]


def parts(drawn: str) -> tuple[str, list[float]]:
    """The elements of an SVG without its numbers, and the numbers. Ids are removed: they are digests of coordinates."""
    drawn = re.sub(r'(id="|"#|url\(#)[\w.-]+', r"\1", drawn)
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    return re.sub(number, "N", drawn), [float(found) for found in re.findall(number, drawn)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_from_checked_in_files(name: str) -> None:
    if missing := figures.missing(name):
        assert not (PLOTS / name).exists(), f"{name} is there, and {missing} it was drawn from is not"
        pytest.skip(f"{name} waits for {', '.join(missing)}")
    drawn, stored = figures.draw(name), (PLOTS / name).read_text(encoding="utf-8")
    assert texts(drawn) == texts(stored), f"{name} is not up to date: make plots"
    if IS_PINNED:
        (elements, numbers), (stored_elements, stored_numbers) = parts(drawn), parts(stored)
        assert elements == stored_elements, f"{name} is not up to date: make plots"
        # Machines differ in the last digits.
        assert numbers == pytest.approx(stored_numbers, abs=1e-3), f"{name} is not up to date: make plots"


@pytest.mark.slow
def test_a_changed_value_changes_a_figure(monkeypatch) -> None:
    """The comparison above detects one point that moved by a thousandth."""
    before = figures.draw("forward.svg")
    cell = figures._run(figures.FORWARD).cells[0]
    result = cell.results["cute_flash"]
    monkeypatch.setitem(cell.results, "cute_flash", replace(result, tflops=1.001 * result.tflops))
    after = figures.draw("forward.svg")
    assert parts(before)[0] == parts(after)[0] and parts(before)[1] != pytest.approx(parts(after)[1], abs=1e-3)


def test_every_figure_is_made_and_shown() -> None:
    there = {path.name for path in PLOTS.iterdir()}
    assert there == {name for name in FIGURES if not figures.missing(name)}
    pages = [path.read_text(encoding="utf-8") for path in doc_tables.DOCUMENTS]
    assert there <= {name for page in pages for name in re.findall(r"/plots/(.*?)\)", page)}


@pytest.mark.slow
def test_the_tables_are_made_from_checked_in_files() -> None:
    shown: set[str] = set()
    for path, folder in doc_tables.DOCUMENTS.items():
        text = path.read_text()
        shown |= {name for name in doc_tables.BLOCKS if f"<!-- made: {name} -->" in text}
        assert doc_tables.embed(text, folder) == text, f"{path} is not up to date: make plots"
        links = re.findall(rf"\]\(({folder}(?:results|reports|plots)/[^)#]*)", text)
        assert links and all((path.parent / link).exists() for link in links)
    assert shown == set(doc_tables.BLOCKS)
    assert "| [forward sm90](../profiling/results/h200/" in PERFORMANCE.read_text()


def test_the_runs_of_the_tables_are_comparable() -> None:
    """Rows of one table have device time, and one order of the inputs in memory; `test_every_run` has their kernels."""
    runs = [load(figures.DATA / path) for path in doc_tables.RUNS.values()]
    assert all(run.is_complete and run.settings["graph"] for run in runs)
    assert {run.settings["layout"] for run in runs} == {"bshd"}
    other = load(figures.DATA / figures.BACKWARD_SM80_BHSD)
    assert other.settings["layout"] == "bhsd" and other.settings["graph"]
    backward = load(figures.DATA / figures.BACKWARD_SM80)
    assert other.machine["source_digest"] == backward.machine["source_digest"]


def test_accuracy_by_distribution() -> None:
    run = load(figures.DATA / figures.FORWARD)
    cell = run.cells[0]
    errors = {name: cell.results["cute_flash"].accuracy[name].max_abs for name in ("normal", "outliers")}
    peers = {name: cell.results["fa3"].accuracy[name].max_abs for name in errors}
    found = {name: doc_results._worst(replace(run, cells=(cell,)), name, "fa3", "max_abs") for name in errors}
    assert found == {name: {"out": pytest.approx(errors[name] / peers[name])} for name in errors}
    assert found["normal"] != found["outliers"]


def test_the_time_that_memory_adds() -> None:
    text = doc_tables.memory()
    # The runs are not interleaved, so a difference of single cells may be negative.
    found = re.search(r"adds (−?\d+) to (\d+) µs \(median (\d+)\) to a call of FlashAttention-2", text)
    assert found
    low, high, median = (int(number.replace("−", "-")) for number in found.groups())
    assert low <= median <= high
    assert text.count("×") == 2 and "-" not in text.partition("through SDPA")[2]


def test_tables_of_counters(monkeypatch, tmp_path) -> None:
    path = tmp_path / figures.COUNTERS
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record()))
    monkeypatch.setattr(doc_tables, "DATA", tmp_path)
    text = "<!-- made: layouts -->\nold\n<!-- end -->\n<!-- made: limits -->\n<!-- end -->\n"
    text = doc_tables.embed(text)
    link = "[plain](reports/h200/fwd-sm80-plain-d128-full-s2048-b2h8.txt)"
    assert f"| fwd-sm80, 128 | {link} | 100.0 | 7,000,000 (7,000,000) |" in text
    assert "| fwd-sm80, 128 | 343 (35%) | 1 % |" in text and "short_scoreboard 75%, wait 25%" in text
    assert "old" not in text and doc_tables.embed(text) == text


@pytest.mark.slow
def test_plots_command(tmp_path, capsys) -> None:
    lacking = [name for name in FIGURES if figures.missing(name)]
    assert cli.main(("plots", "--out", str(tmp_path))) == (NOT_MEASURED if lacking else OK)
    assert {path.name for path in tmp_path.iterdir()} == set(FIGURES) - set(lacking)
    said = capsys.readouterr().out
    assert all(f"- {name}: no {', '.join(figures.missing(name))}" in said for name in lacking)


def record() -> dict:
    """A record of two layouts of a forward kernel, as `profiling ncu` writes it; the plain layout has conflicts."""
    cases = {}
    for layout, conflicts in (("swizzled", 0.0), ("plain", 7e6)):
        case = Case("fwd-sm80", layout, Shape(2, 8, 8, 2048, 128, False))
        measured: dict[str, float | None] = dict.fromkeys(METRICS, 1e6)
        measured |= {"sass_ldsm_conflicts": conflicts, "sass_ldsm_wavefronts": 1e6 + conflicts}
        measured |= {"duration_ns": 1e5, "dram_write_bytes": None}
        predicted = {name: value for name, value in measured.items() if value is not None}
        predicted["dram_write_bytes"] = 2e6
        cases[case.id] = {
            "kernel": case.kernel,
            "layout": layout,
            "shape": vars(case.shape),
            "measured": measured | {"tensor_percent": 1.0, "occupancy_percent": 12.5},
            "stalls": {"short_scoreboard": 1.5, "wait": 0.5},
            "tflops": 343.0,
            "report": f"{case.id}.ncu-rep",
            "predicted": predicted,
        }
    machine = {"gpu": "NVIDIA H200", "git_commit": "0123456789"}
    return json.loads(json.dumps({"cases": cases, "machine": machine, "ncu": "Version 2025.3.1.0"}))


def drawn_with(colour: str, figure: Figure) -> list[float]:
    """The lengths of the bars with a colour."""
    patches = [patch for axes in figure.axes for patch in axes.patches]
    return [patch.get_width() for patch in patches if to_hex(patch.get_facecolor()) == colour]


def test_conflicts_by_layout() -> None:
    with style():
        figure = plot_counters.conflicts(record(), "title")
        said = texts(svg(figure))
    assert "title" in said and said.index("swizzled") < said.index("plain")
    assert "7.00M (7.00M)" in said and "0 (0)" in said and "100.0" in said
    # Pairs of predicted and measured: loads of the plain layout; stores of both layouts, all of them conflicts here.
    assert drawn_with(RED, figure) == [7e6, 7e6, 1e6, 1e6, 1e6, 1e6]
    assert drawn_with(BLUE, figure).count(100.0) == 2


def test_bytes_beside_their_prediction() -> None:
    with style():
        figure = plot_counters.hbm_bytes(record(), "title")
        said = texts(svg(figure))
    assert said.count("1.00 (1.00)") == 2 and said.count("-") == 2
    assert "fwd-sm80, D 128, plain" in said
    # Written bytes were not measured.
    assert drawn_with(BLUE, figure) == [1e6] * 4 + [2e6] * 2


def test_curves_are_the_speeds_of_the_run() -> None:
    run = figures._run(figures.FORWARD)
    with style():
        figure = plot_speed.speed(run, "title")
    assert [axes.get_title(loc="left") for axes in figure.axes][3] == "D = 64, causal"
    curves = {line.get_label(): line for line in figure.axes[3].lines}
    cells = [cell for cell in run.cells if cell.shape.head_dim == 64 and cell.shape.causal]
    for name in ("cute_flash", "fa4"):
        curve = curves[LOOKS[name].label]
        assert list(curve.get_xdata()) == [cell.shape.seqlen for cell in cells]
        assert list(curve.get_ydata()) == [cell.tflops(name) for cell in cells]
    assert curves["FlashAttention-4"].get_color() == PURPLE


def test_the_summary_shows_the_speed_over_the_best_peer() -> None:
    run = figures._run(figures.FORWARD)
    with style():
        figure = plot_speed.summary({"Forward": run})
    cells = [cell for cell in run.cells if cell.shape.head_dim == 64 and not cell.shape.causal]
    ratios = [cell.tflops("cute_flash") / max(cell.tflops(peer) for peer in run.peers) for cell in cells]
    assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx(ratios)


def test_every_peer_of_a_run_has_a_look() -> None:
    for path in (figures.FORWARD, figures.BACKWARD):
        assert set(figures._run(path).names) <= set(LOOKS)
    assert len({look[1:] for look in LOOKS.values()}) == len(LOOKS)
