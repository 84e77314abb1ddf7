"""The figures are what the checked-in files say, byte for byte; and the parts that draw them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from profiling import __main__ as cli
from profiling import axes, doc_tables, figures, plot_counters, plot_speed
from profiling.figures import FIGURES, FOLDER
from profiling.ncu_case import Case
from profiling.ncu_metrics import METRICS
from profiling.suites import Shape
from profiling.svg import COLOURS, Canvas, number

PERFORMANCE = Path(__file__).parents[2] / "docs" / "performance.md"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_from_checked_in_files(name: str) -> None:
    figure = FIGURES[name]
    if figure.missing:
        assert not (FOLDER / name).exists(), f"{name} is there, and {figure.missing} it was drawn from is not"
        pytest.skip(f"{name} waits for {', '.join(figure.missing)}")
    drawn = figure.draw()
    ElementTree.fromstring(drawn)
    assert (FOLDER / name).read_bytes() == drawn.encode(), f"{name} is not up to date: make plots"


def test_no_other_figure_is_there_and_all_are_shown() -> None:
    there = {path.name for path in FOLDER.iterdir()}
    assert there == {name for name, figure in FIGURES.items() if not figure.missing}
    assert there <= set(re.findall(r"/plots/(.*?)\)", PERFORMANCE.read_text()))


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


def test_plots_command(tmp_path, capsys) -> None:
    lacking = [name for name, figure in FIGURES.items() if figure.missing]
    assert cli.main(("plots", "--out", str(tmp_path))) == (cli.NOT_MEASURED if lacking else cli.OK)
    assert {path.name for path in tmp_path.iterdir()} == set(FIGURES) - set(lacking)
    said = capsys.readouterr().out
    assert all(f"- {name}: no {figures.COUNTERS}" in said for name in lacking)


def record() -> dict:
    """Two layouts of a forward kernel, as `profiling ncu` writes them; the plain one conflicts."""
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


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_conflicts_by_layout() -> None:
    svg = plot_counters.conflicts(record(), "title")
    said = texts(svg)
    assert said.index("swizzled") < said.index("plain")
    assert "7.00M (7.00M)" in said and "0 (0)" in said and "100.0" in said
    # Of loads and stores, predicted and measured: the stores of the sample are nothing but conflicts.
    assert svg.count('class="red bar"') == 1 + 1 + 2 and svg.count('class="red faint"') == 1 + 2


def test_bytes_beside_their_prediction() -> None:
    said = texts(plot_counters.hbm_bytes(record(), "title"))
    assert said.count("1.00 (1.00)") == 2 and said.count("-") == 2
    assert "fwd-sm80, D 128, plain" in said


def test_every_provider_of_a_run_has_a_look() -> None:
    for path in (figures.FORWARD, figures.BACKWARD):
        assert set(figures._run(path).providers) <= set(plot_speed.LOOKS)
    assert {colour for _, _, colour in plot_speed.LOOKS.values()} <= set(COLOURS)
    assert len({look[1:] for look in plot_speed.LOOKS.values()}) == len(plot_speed.LOOKS)


def test_numbers_and_scales() -> None:
    assert [number(value) for value in (0.04, -0.04, 12.0, 3.14159, -2.55)] == ["0", "0", "12", "3.1", "-2.5"]
    log = axes.Scale(512, 16384, (), is_log=True)
    assert [log.place(value) for value in (512, 1024, 16384)] == pytest.approx([0, 0.2, 1])
    assert axes.linear(760).ticks == (0, 200, 400, 600, 800)
    assert [axes.nice_top(value) for value in (1, 1.2, 740, 8.3)] == [1, 1.5, 800, 10]
    assert [axes.short(value) for value in (200, 512, 2048, 25e6)] == ["200", "512", "2k", "25M"]


def test_text_is_escaped_and_both_palettes_are_there() -> None:
    svg = Canvas(10, 10, "a < b & c").render()
    assert "a &lt; b &amp; c" in svg and "prefers-color-scheme:dark" in svg
    for light, dark in COLOURS.values():
        assert light in svg and dark in svg
