"""The notebooks run from their own folder; one draws what `layouts` and `BlockMask` compute."""

from __future__ import annotations

import os
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
