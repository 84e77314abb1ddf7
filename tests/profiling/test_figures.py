"""The figures and the tables of the documents agree with the checked-in result files."""

from __future__ import annotations

import json
import math
import re
import statistics
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from profiling import __main__ as cli
from profiling.documents import doc_tables, figures, plot_speed, sources
from profiling.documents.doc_speed import RUNS
from profiling.documents.figures import FIGURES
from profiling.documents.plot_style import LOOKS, style
from profiling.documents.sources import Recipe, read
from profiling.measure.machine import PLOTS, ROOT
from profiling.measure.study import NOT_MEASURED, OK

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
    drawn, stored = figures.draw(name), (PLOTS / name).read_text(encoding="utf-8")
    assert texts(drawn) == texts(stored), f"{name} is not up to date: make plots"
    if IS_PINNED:
        (elements, numbers), (stored_elements, stored_numbers) = parts(drawn), parts(stored)
        assert elements == stored_elements, f"{name} is not up to date: make plots"
        # Machines differ in the last digits.
        assert numbers == pytest.approx(stored_numbers, abs=1e-3), f"{name} is not up to date: make plots"


def test_sm80_rows_have_the_tiles_of_an_a100() -> None:
    """The means of README, from the times of the result files; and the means with the tiles of other GPUs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    others = []
    for direction, path in zip(("forward", "backward"), sources.TILES, strict=True):
        cells = json.loads((sources.DATA / path).read_text("utf-8"))["cells"]
        ratios = {
            gpu: [x["results"]["sdpa-flash"]["ms"] / x["results"][f"cute_flash-{gpu}"]["ms"] for x in cells]
            for gpu in ("A100", "L40S", "sm80")
        }
        means = {gpu: f"{math.exp(statistics.fmean(map(math.log, x))):.2f}" for gpu, x in ratios.items()}
        reach = f"{min(ratios['A100']):.2f} to {max(ratios['A100']):.2f}"
        assert (
            f"| [{direction} sm80, tiles of an A100](profiling/{path}) | FA2 | **{means['A100']}** | {reach} |" in text
        )
        others.append((means, sum(x < 1 for x in ratios["L40S"]), len(cells)))
    (first, slower, count), (second, also_slower, also) = others
    assert (
        f"have {first['L40S']} and {second['L40S']} ({slower + also_slower} of {count + also} cells are below" in text
    )
    assert f"with those of Hopper {first['sm80']} and {second['sm80']}." in text


def test_every_figure_is_made_and_shown() -> None:
    there = {path.name for path in PLOTS.iterdir()}
    pages = [path.read_text(encoding="utf-8") for path in doc_tables.DOCUMENTS]
    assert there == set(FIGURES) <= {name for page in pages for name in re.findall(r"/plots/(.*?)\)", page)}


@pytest.mark.slow
def test_the_tables_are_made_from_checked_in_files() -> None:
    shown: set[str] = set()
    links: list[Path] = []
    for path, folder in doc_tables.DOCUMENTS.items():
        text = path.read_text()
        shown |= {name for name in doc_tables.BLOCKS if f"<!-- made: {name} -->" in text}
        assert doc_tables.embed(text, folder) == text, f"{path} is not up to date: make plots"
        names = re.findall(rf"\]\(({folder}(?:results|reports|plots)/[^)#]*)", text)
        links += [path.parent / name for name in names]
    assert len(links) > 20 and all(link.exists() for link in links)
    assert shown == set(doc_tables.BLOCKS)


def test_the_runs_of_the_tables_are_comparable() -> None:
    """Rows of one table have device time, and one order of the inputs in memory; `test_every_run` has their kernels."""
    runs = [read(path) for path in RUNS.values()]
    assert all(run.is_complete and run.settings["graph"] for run in runs)
    assert {run.settings["layout"] for run in runs} == {"bshd"}
    other, backward = read(sources.BACKWARD_SM80_BHSD), read(sources.BACKWARD_SM80)
    assert other.settings["layout"] == "bhsd" and other.settings["graph"]
    assert other.machine["source_digest"] == backward.machine["source_digest"]


def test_a_missing_file_is_named(monkeypatch, tmp_path, capsys) -> None:
    absent = Recipe(lambda record: record, ("results/no-such.json",))
    monkeypatch.setitem(doc_tables.BLOCKS, "absent", absent)
    text = "<!-- made: absent -->\nold\n<!-- end -->\n<!-- made: hbm -->\n<!-- end -->\n"
    embedded = doc_tables.embed(text, "../")
    assert "*Not measured yet: results/no-such.json does not exist.*" in embedded and "old" not in embedded
    assert "](../plots/hbm.svg)" in embedded and doc_tables.embed(embedded, "../") == embedded
    for drawn, status in (({"ridge.svg": FIGURES["ridge.svg"]}, OK), ({"absent.svg": absent}, NOT_MEASURED)):
        monkeypatch.setattr(figures, "FIGURES", drawn)
        assert cli.main(("plots", "--out", str(tmp_path))) == status
    assert [path.name for path in tmp_path.iterdir()] == ["ridge.svg"]
    assert "- absent.svg: no results/no-such.json" in capsys.readouterr().out


def test_curves_are_the_speeds_of_the_run() -> None:
    run = read(sources.FORWARD)
    with style():
        speed, summary = plot_speed.speed(run, "title"), plot_speed.summary(run, read(sources.BACKWARD))
    assert speed.axes[3].get_title(loc="left") == "D = 64, causal"
    curves = {line.get_label(): line for line in speed.axes[3].lines}
    cells = [cell for cell in run.cells if cell.shape.head_dim == 64 and cell.shape.causal]
    for name in ("cute_flash", "fa4"):
        assert list(curves[LOOKS[name].label].get_xdata()) == [cell.shape.seqlen for cell in cells]
        assert list(curves[LOOKS[name].label].get_ydata()) == [cell.tflops(name) for cell in cells]
    ratios = [cell.tflops("cute_flash") / max(cell.tflops(peer) for peer in run.peers) for cell in cells]
    assert list(summary.axes[0].lines[1].get_ydata()) == pytest.approx(ratios)


def test_every_peer_of_a_run_has_a_look() -> None:
    assert {*read(sources.FORWARD).names, *read(sources.BACKWARD).names} <= set(LOOKS)
    assert len({look[1:] for look in LOOKS.values()}) == len(LOOKS)


def test_speeds_of_head_dims_above_256() -> None:
    """The table of performance.md and the sentence of README, from the times of the result files."""
    runs = [json.loads((sources.DATA / path).read_text("utf-8")) for path in sources.WIDE]
    cells = [{cell["key"].partition("-")[2]: cell for cell in run["cells"]} for run in runs]
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [*cells[0]] == [*cells[1]] and len(cells[0]) == 12
    reached: list[list[float]] = [[], []]
    for name in cells[0]:
        texts, shape = [], cells[0][name]["shape"]
        for by_name, ratios in zip(cells, reached, strict=True):
            ms = {peer: result["ms"] for peer, result in by_name[name]["results"].items()}
            speeds = [by_name[name]["flops"] / ms[peer] / 1e9 for peer in ("cute_flash", "cute_flash-sm80", "ffpa")]
            ratio = ms["ffpa"] / ms["cute_flash"]
            texts += [*(f"{speed:.0f}" for speed in speeds), f"**{ratio:.2f}**"]
            ratios += [ratio] if shape["head_dim"] == 512 else []
        mask = "causal" if shape["causal"] else "full"
        assert f"| {shape['head_dim']}, {mask} | {shape['seqlen']} | {' | '.join(texts)} |" in page
    reach = [f"{min(ratios):.2f} to {max(ratios):.2f} ×" for ratios in reached]
    changelog = " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())
    for text in (readme, changelog):
        assert f"D = 512, the forward is {reach[0]} and the backward {reach[1]} as fast as FFPA" in text


def test_the_runs_of_head_dims_above_256_are_comparable() -> None:
    runs = [read(path) for path in sources.WIDE]
    assert len({run.machine["source_digest"] for run in runs}) == 1
    for run in runs:
        assert run.is_complete and run.settings["graph"] and run.settings["layout"] == "bshd"
        assert not any(result.is_wrong or result.error for cell in run.cells for result in cell.results.values())
