"""`python -m profiling plots`: the figures and the tables of the documents."""

from __future__ import annotations

import argparse
from pathlib import Path

from profiling.measure import machine
from profiling.measure.study import NOT_MEASURED, OK, Command
from profiling.measure.tables import print_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "draw the figures into DIR and write no tables"
    parser.add_argument("--out", type=Path, default=machine.PLOTS, metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    # These modules need the checked-in results and matplotlib, which measuring does not.
    from profiling.documents import doc_tables, figures

    missing = figures.write(args.out)
    if args.out == machine.PLOTS:
        doc_tables.write()
    print(f"wrote {len(figures.FIGURES) - len(missing)} figures to {args.out}")
    print_lines("Not drawn", [f"{name}: no {file}" for name, file in missing.items()])
    return NOT_MEASURED if missing else OK


COMMAND = Command("plots", "figures and tables of the documents; needs no GPU", ("",), add_arguments, run)
