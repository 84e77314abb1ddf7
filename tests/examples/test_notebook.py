"""The notebook runs from its own folder, and draws what `layouts` and `BlockMask` compute."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from layouts import VARIANTS, SmemTile, tile_report

PATH = Path(__file__).parents[2] / "examples" / "draw_masks.ipynb"


def test_the_stored_notebook_is_short_and_has_no_output() -> None:
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    assert sum(len(cell.source.splitlines()) for cell in cells) <= 80


@pytest.mark.processes
def test_the_notebook_runs() -> None:
    notebook = nbformat.read(PATH, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    # A causal mask of 8 x 8 blocks: 36 of 64 are not empty.
    assert "causal: 56.2% of blocks are not empty\n" in printed
    for variant, wavefronts in {"swizzled": 1, "padded": 1, "plain": 8}.items():
        assert f"{variant}: wavefronts of 8 rows by ldmatrix: {wavefronts}\n" in printed
    for variant in VARIANTS:
        conflicts = sum(access.conflicts for access in tile_report(SmemTile(64, 64, variant=variant)).values())
        assert f"{variant}: {conflicts} conflicts\n" in printed
