"""Tables and progress: with rich if it is installed and the output is a terminal, else plain text.

The plain table is Markdown, so that it can be copied from a log into a document.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TextIO


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown(table: Table) -> str:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    # The first column names the row; numbers are aligned to the right.
    lines = ["| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |" for row in rows]
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([table.title, "", lines[0], rule, *lines[1:], ""])


def _has_rich(stream: TextIO) -> bool:
    if not stream.isatty():
        return False
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def show(tables: Sequence[Table], stream: TextIO | None = None) -> None:
    stream = stream or sys.stdout
    if not _has_rich(stream):
        print("\n".join(markdown(table) for table in tables), file=stream)
        return
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(file=stream)
    for table in tables:
        pretty = RichTable(title=table.title, title_justify="left")
        for i, column in enumerate(table.columns):
            pretty.add_column(column, justify="right" if i else "left")
        for row in table.rows:
            pretty.add_row(*row)
        console.print(pretty)


class Step(Protocol):
    def __call__(self, line: str) -> None: ...


@contextmanager
def progress(total: int, stream: TextIO | None = None) -> Iterator[Step]:
    """Yields a function to call with a line after each of `total` steps: a bar with rich, else numbered lines."""
    stream = stream or sys.stderr
    done = 0

    def numbered(line: str) -> None:
        nonlocal done
        done += 1
        print(f"[{done}/{total}] {line}", file=stream, flush=True)

    if not _has_rich(stream):
        yield numbered
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(file=stream)
    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("bench", total=total)

        def advanced(line: str) -> None:
            console.print(line, highlight=False, markup=False)
            bar.advance(task)

        yield advanced


def print_unavailable(reasons: dict[str, str]) -> None:
    for name, reason in reasons.items():
        print(f"{name} is not available: {reason}", file=sys.stderr)


def print_lines(title: str, lines: Sequence[str]) -> None:
    if lines:
        print("\n".join([f"{title}:", *(f"- {line}" for line in lines), ""]))
