from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

import layouts
from layouts import ACCESSES, VARIANTS, SmemTile, conflict_table, svg_picture, text_picture
from layouts.__main__ import FIGURES, main

README = Path(layouts.__file__).with_name("README.md")


def first_phase(tile: SmemTile):
    return ACCESSES["ldmatrix_a"](tile).phases[0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cols", [64, 96])
def test_the_numbers_do_repeat(cols: int, variant: str) -> None:
    lines = text_picture(SmemTile(64, cols, variant=variant), num_rows=64).splitlines()[3:]
    rows = [line.removeprefix(f"row {number:4d}") for number, line in enumerate(lines)]
    assert len(rows) == 64
    assert rows == rows[:8] * 8


def test_picture_reaches_its_phase() -> None:
    tile = SmemTile(64, 64)
    last = ACCESSES["ldmatrix_a"](tile).phases[-1]
    assert text_picture(tile, last, num_rows=8).count("[") == 1 + 8
    assert len(re.findall('fill="none"', svg_picture(tile, last, num_rows=8))) == 8


def test_colours_change_nothing_else() -> None:
    tile = SmemTile(64, 64)
    coloured = text_picture(tile, first_phase(tile), has_colour=True)
    assert coloured.count("\x1b[48;5;") == 16 * 8
    stripped = re.sub("\x1b\\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == text_picture(tile, first_phase(tile)).splitlines()


def test_main_prints_and_writes(capsys, tmp_path) -> None:
    target = tmp_path / "tile.svg"
    assert main(["--rows", "16", "--variant", "plain", "--svg", str(target), "--color", "always"]) == 0
    out = capsys.readouterr().out
    tile = SmemTile(16, 64, variant="plain")
    assert text_picture(tile, first_phase(tile), has_colour=True) in out
    assert conflict_table(16, 64) in out
    assert target.read_text() == svg_picture(tile, first_phase(tile))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "12"], "rows=12"),
        (["--rows", "8"], "rows=8"),
        (["--cols", "40"], "cols=40"),
        (["--phase", "64"], "--phase 64: there are the phases 0 to 63"),
        (["--draw-rows", "0"], "--draw-rows 0"),
        (["--kernel", "fwd-sm90", "--variant", "padded"], "--variant padded: use one of swizzled, swizz"),
        (["--kernel", "fwd-sm80", "--instruction", "stmatrix"], "the instructions of K are cp.async, ldmatrix"),
        (["--kernel", "fwd-sm80", "--head-dim", "520"], "head_dim=520"),
        (["--svg", "no/such/folder/tile.svg"], "no/such/folder"),
    ],
)
def test_main_reports_errors(arguments: list[str], message: str, capsys) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_readme_shows_what_the_commands_print(capsys, monkeypatch, tmp_path) -> None:
    text = README.read_text()
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"```bash\n(.*?)\n```\n+```text\n(.*?)```", text, re.DOTALL)
    assert len(shown) == text.count("```bash") >= 3
    for command, output in shown:
        python, dash_m, module, *arguments = shlex.split(command)
        assert (python, dash_m, module) == ("python", "-m", "layouts")
        assert main(arguments) == 0
        assert capsys.readouterr().out == output


def test_readme_example_prints_what_its_comments_say(capsys, tmp_path) -> None:
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[-1]
    script = tmp_path / "example.py"
    script.write_text(example)
    runpy.run_path(str(script))
    printed = capsys.readouterr().out.splitlines()
    comments = re.findall(r"print\(.*# (.*)", example)
    assert len(printed) == 2
    assert all(comment.startswith(line) for line, comment in zip(printed, comments, strict=True))


def test_figures_are_what_the_code_draws(tmp_path) -> None:
    """Byte for byte; `python -m layouts --figures layouts/svg` writes them again."""
    assert main(["--figures", str(tmp_path)]) == 0
    checked_in = README.with_name("svg")
    assert {path.name for path in checked_in.iterdir()} == set(FIGURES)
    shown = re.findall(r"\(svg/(.*?)\)", README.read_text())
    assert sorted(shown) == sorted(FIGURES)
    for name in FIGURES:
        assert (tmp_path / name).read_bytes() == (checked_in / name).read_bytes(), name
        ElementTree.parse(tmp_path / name)


def test_main_says_what_no_counter_sees(capsys) -> None:
    assert main(["--kernel", "fwd-sm90", "--operand", "K"]) == 0
    assert "filled by TMA and read by wgmma" in capsys.readouterr().out
