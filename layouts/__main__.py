"""`python -m layouts`: the picture of a tile, and the bank conflicts of its three variants."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from layouts.banks import ACCESSES
from layouts.draw import conflict_table, svg_picture, text_picture
from layouts.smem import VARIANTS, SmemTile


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="layouts", description=__doc__)
    parser.add_argument("--rows", type=int, default=64, help="rows of the tile (default: %(default)s)")
    parser.add_argument(
        "--cols", type=int, default=64, help="columns of 2-byte elements (default: %(default)s)"
    )
    parser.add_argument(
        "--variant", choices=VARIANTS, default="swizzled", help="what to draw (default: %(default)s)"
    )
    parser.add_argument(
        "--access", choices=ACCESSES, default="ldmatrix_a", help="what to mark (default: %(default)s)"
    )
    parser.add_argument(
        "--phase", type=int, default=0, help="which phase of the access to mark (default: %(default)s)"
    )
    parser.add_argument(
        "--draw-rows", type=int, default=16, help="rows in the picture (default: %(default)s)"
    )
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal"
    )
    parser.add_argument("--picture-only", action="store_true", help="leave out the table of conflicts")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture as SVG too")
    return parser


def _has_colour(choice: str) -> bool:
    if choice == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return choice == "always"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        tile = SmemTile(args.rows, args.cols, variant=args.variant)
        phases = ACCESSES[args.access](tile).phases
        if not 0 <= args.phase < len(phases):
            raise ValueError(f"--phase {args.phase}: {args.access} has the phases 0 to {len(phases) - 1}")
        if args.draw_rows < 1:
            raise ValueError(f"--draw-rows {args.draw_rows}: must be 1 or more")
        phase = phases[args.phase]
        print(text_picture(tile, phase, args.draw_rows, _has_colour(args.color)), end="")
        if not args.picture_only:
            print(f"\n{conflict_table(args.rows, args.cols)}", end="")
        if args.svg:
            args.svg.write_text(svg_picture(tile, phase, args.draw_rows), encoding="utf-8")
            print(f"\nwrote {args.svg}")
    except (OSError, ValueError) as error:
        print(f"layouts: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
