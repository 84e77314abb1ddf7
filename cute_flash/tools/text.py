"""The output of commands in two columns: labels and texts."""

from __future__ import annotations

LABEL_WIDTH = 12


def aligned(lines: list[str]) -> list[str]:
    """Align the texts of "label  text" lines in one column."""
    return [f"{label:<{LABEL_WIDTH}}{text}" for label, text in (line.split(None, 1) for line in lines)]
