"""The table of mutants fits the sources: each text occurs once, and each test exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import applied
from tests.mutants.table import MUTANTS, ROOT, Mutant


def test_every_text_occurs_once_and_the_mutant_is_python() -> None:
    for mutant in MUTANTS:
        text = mutant.file().read_text(encoding="utf-8")
        ast.parse(text.replace(mutant.old, mutant.new))
        assert mutant.old != mutant.new


def test_every_test_exists() -> None:
    for path in {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}:
        assert (ROOT / path).exists(), path


def test_there_are_enough_mutants_of_every_area() -> None:
    assert len(MUTANTS) == len({mutant.name for mutant in MUTANTS}) >= 50
    parts = ("spec/band", "device/scores", "device/gradients", "reference", "planning", "features", "smem", "layouts")
    for part in (*parts, "distributed", "reference/decode", "integrations"):
        assert any(part in mutant.where for mutant in MUTANTS), part


def test_a_mutant_is_applied_to_a_copy_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.py"
    path.parent.mkdir()
    path.write_text("x = 1\ny = 2\n")
    mutant = Mutant("a", "x = 1", "x = 2", ())
    with applied(mutant, tmp_path):
        assert path.read_text() == "x = 2\ny = 2\n"
    assert path.read_text() == "x = 1\ny = 2\n"
    for text in ("x = 1\nx = 1\n", "y\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="occurs"):
            mutant.file(tmp_path)
