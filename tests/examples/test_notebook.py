"""The notebooks run from their own folder, and show what the library, `layouts` and the ladder compute."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from layouts import VARIANTS, SmemTile, tile_report

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_notebooks_are_short_and_have_no_output(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    assert sum(len(cell.source.splitlines()) for cell in cells) <= 100


def executed(name: str) -> nbformat.NotebookNode:
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "examples")}})
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    return notebook


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


@pytest.mark.processes
def test_getting_started_runs() -> None:
    """Its cells compare each call with torch, and fail if they differ."""
    lines = printed(executed("getting_started.ipynb")).splitlines()
    assert sum(line.endswith(": the same as torch, up to rounding") for line in lines) == 6
    first, last = map(
        float, next(line for line in lines if line.startswith("loss:")).removeprefix("loss:").split(", then")
    )
    assert last < 0.8 * first
    assert any("'is_causal': write causal=" in line for line in lines)
    assert any(line.startswith("kernel      fwd_sm90") for line in lines)


@pytest.mark.processes
def test_pictures_of_masks_and_banks() -> None:
    notebook = executed("draw_masks.ipynb")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    text = printed(notebook)
    # A causal mask of 8 x 8 blocks: 36 of 64 are not empty.
    assert "causal: 56.2% of blocks are not empty\n" in text
    for variant, wavefronts in {"swizzled": 1, "padded": 1, "plain": 8}.items():
        assert f"{variant}: wavefronts of 8 rows by ldmatrix: {wavefronts}\n" in text
    for variant in VARIANTS:
        conflicts = sum(access.conflicts for access in tile_report(SmemTile(64, 64, variant=variant)).values())
        assert f"{variant}: {conflicts} conflicts\n" in text


@pytest.mark.compiles
@pytest.mark.processes
def test_the_ladder_shows_machine_code_conflicts_and_tiles() -> None:
    notebook = executed("ladder.ipynb")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output.data["image/svg+xml"] for output in outputs if "image/svg+xml" in output.get("data", {})]
    captions = [re.search(r"framed = one phase: (\d+) wavefronts?<", picture)[1] for picture in pictures]
    assert captions == ["8", "1", "1"]
    text = printed(notebook)
    assert re.search(r"^ldmatrix of K +4096 \(3584\) +512 \(0\) +512 \(0\)$", text, re.MULTILINE)
    assert re.search(r"LDSM\.16\.M88\.4 R\d+, \[", text) and re.search(r"HMMA\.16816\.F32\.BF16 R\d+, R", text)

    # (queries, keys, warps): registers, bytes spilled, KB of shared memory, CTAs by registers and by shared memory.
    rows = [tuple(map(int, line.split())) for line in text.splitlines() if re.fullmatch(r"( +\d+){8}", line)]
    tiles = {row[:3]: row[3:] for row in rows}
    assert list(tiles) == [(128, 48, 4), (64, 64, 4), (128, 128, 8), (128, 64, 4)]
    # Q and two stages of K and V, in bf16.
    assert all(row[2] == 2 * 128 * (m + 4 * n) // 1024 for (m, n, _), row in tiles.items())
    assert [row[3:] for row in tiles.values()] == [(2, 2), (3, 2), (1, 1), (2, 1)]
    # Only 32 queries of a warp with 64 keys need more registers than a thread can have.
    assert [bool(row[1]) for row in tiles.values()] == [False, False, False, True]

    def a_score(instruction: str) -> list[float]:
        return [float(x) for x in re.search(rf"^{instruction} +(.*)$", text, re.MULTILINE)[1].split()]

    rung_4, rung_5, rung_6 = a_score("all")
    assert rung_4 > rung_5 > rung_6
    # A score has 2 x 128 multiplications, an mma.sync 16 x 8 x 16, by 32 threads: 32 x 256 / 2048 = 4.
    assert a_score("HMMA") == [4, 4, 0] and a_score("HGMMA")[2] > 0 and a_score("STS")[1:] == [0, 0]
    assert "There is no GPU here: nothing was run.\n" in text or re.search(r"rung 5: error [01]\.", text)
