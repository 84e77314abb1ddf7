"""Tables: drawn by rich on a terminal, Markdown elsewhere, to be copied from a log into a document."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number(value: float | None, form: str = ".2f", missing: str = "-") -> str:
    """A number of a table; "-" if there is none."""
    return missing if value is None else format(value, form)


def markdown(table: Table) -> str:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    # The first column names the row; numbers are aligned to the right.
    lines = ["| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |" for row in rows]
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([table.title, "", lines[0], rule, *lines[1:], ""])


def show(tables: Sequence[Table], stream: TextIO | None = None) -> None:
    stream = stream or sys.stdout
    if not stream.isatty():
        print("\n".join(markdown(table) for table in tables), file=stream)
        return
    console = Console(file=stream)
    for table in tables:
        pretty = RichTable(title=table.title, title_justify="left")
        for i, column in enumerate(table.columns):
            pretty.add_column(column, justify="right" if i else "left")
        for row in table.rows:
            pretty.add_row(*row)
        console.print(pretty)


def print_unavailable(reasons: dict[str, str]) -> None:
    """Print a line for each reason, with the names that share it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    for reason, shared in names.items():
        print(f"{', '.join(shared)} {'are' if len(shared) > 1 else 'is'} not available: {reason}", file=sys.stderr)


def print_lines(title: str, lines: Sequence[str]) -> None:
    if lines:
        print("\n".join([f"{title}:", *(f"- {line}" for line in lines), ""]))


def geometric_mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return math.exp(sum(math.log(value) for value in values) / len(values))
