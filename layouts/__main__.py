"""`python -m layouts` draws a shared-memory tile, and compares its bank conflicts with those of other layouts.

With --kernel it draws a tile of a kernel, and counts all shared-memory accesses of that kernel. A study, such as
`python -m layouts loops`, is the command of `cute-flash` with the same name.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from cute_flash.planning.plan import plan_forward
from cute_flash.smem.tile import HOPPER_VARIANTS, VARIANTS, SmemTile
from cute_flash.spec import arch
from cute_flash.spec.problem import Problem
from cute_flash.tools import cli
from cute_flash.tools.studies import STUDIES
from layouts.banks import ACCESSES, Phase
from layouts.draw import conflict_table, kernel_table, svg_banks, svg_picture, text_banks, text_picture
from layouts.kernels import Use, sm80_tiles, sm80_uses, sm90_tiles, sm90_uses

# The layout variants of a kernel, and functions from a row of its tile table to tiles and to accesses.
Kernel = tuple[tuple[str, ...], Callable[[Any], dict[str, SmemTile]], Callable[[Any], tuple[Use, ...]]]
KERNELS: dict[str, Kernel] = {
    "fwd-sm80": (VARIANTS, sm80_tiles, sm80_uses),
    "fwd-sm90": (HOPPER_VARIANTS, sm90_tiles, sm90_uses),
}
OPERANDS = ("Q", "K", "V", "O")
# The figures of README.md, each with the arguments that draw it.
FIGURES = {
    "k-plain.svg": "--kernel fwd-sm80 --variant plain --draw-rows 8",
    "k-plain-banks.svg": "--kernel fwd-sm80 --variant plain --view banks",
    "k-swizzled.svg": "--kernel fwd-sm80 --draw-rows 8",
    "k-swizzled-banks.svg": "--kernel fwd-sm80 --view banks",
    "k-padded.svg": "--kernel fwd-sm80 --variant padded --draw-rows 8",
    "k96-swizzled.svg": "--kernel fwd-sm80 --head-dim 96 --draw-rows 8",
    "k-padded-copy.svg": "--kernel fwd-sm80 --variant padded --view banks --instruction cp.async --phase 1",
    "o-swizzled-banks.svg": "--kernel fwd-sm80 --operand O --view banks",
    "o-swizzled32.svg": "--kernel fwd-sm90 --operand O --variant swizzled32 --draw-rows 8",
    "o-interleaved.svg": "--kernel fwd-sm90 --operand O --variant interleaved --draw-rows 8",
}
NOT_COUNTED = "filled by TMA and read by wgmma: neither goes through the load/store units, nothing to mark\n"


@dataclass(frozen=True)
class Subject:
    """The content of a picture, and the table under it."""

    title: str
    tile: SmemTile
    phases: tuple[Phase, ...]
    table: str


def _parser() -> argparse.ArgumentParser:
    names = {
        **{name: study.text for name, study in STUDIES.items()},
        "explain": "with --cp: cost of context parallelism",
    }
    lines = "\n".join(f"  {name:<9} {text}" for name, text in names.items())
    parser = argparse.ArgumentParser(
        prog="layouts", description=__doc__, epilog=f"studies:\n{lines}", formatter_class=cli.HELP_FORMATTER
    )
    add = parser.add_argument
    every = tuple(dict.fromkeys(VARIANTS + HOPPER_VARIANTS))
    add("--rows", type=int, default=64, help="rows of the tile (default: %(default)s)")
    add("--cols", type=int, default=64, help="columns of 2-byte elements (default: %(default)s)")
    add("--variant", choices=every, default="swizzled", help="layout to draw (default: %(default)s)")
    add("--access", choices=ACCESSES, default="ldmatrix_a", help="access to mark (default: %(default)s)")
    add("--kernel", choices=KERNELS, help="draw a tile of this kernel; replaces --rows, --cols and --access")
    add("--operand", choices=OPERANDS, default="K", help="operand of the kernel (default: %(default)s)")
    add("--instruction", help="instruction to mark, such as cp.async (default: the instruction that reads the operand)")
    add("--head-dim", type=int, default=128, help="head dim of the kernel (default: %(default)s)")
    add("--arch", default="sm_90", help="architecture of the kernel's tile table (default: %(default)s)")
    add("--phase", type=int, default=0, help="phase of the access to mark (default: %(default)s)")
    add("--view", choices=("tile", "banks"), default="tile", help="draw the tile, or its banks wavefront by wavefront")
    add("--draw-rows", type=int, default=16, help="rows in the picture (default: %(default)s)")
    add("--color", choices=("auto", "always", "never"), default="auto", help="auto: only on a terminal")
    add("--picture-only", action="store_true", help="omit the table of conflicts")
    add("--svg", type=Path, metavar="FILE", help="also write the picture as SVG")
    add("--figures", type=Path, metavar="DIR", help="write the figures of README.md to a folder, and nothing else")
    return parser


def _has_colour(choice: str) -> bool:
    if choice == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return choice == "always"


def _kernel_tile(args: argparse.Namespace) -> Any:
    """The tile that the kernel uses at this head dim."""
    family = args.kernel.removeprefix("fwd-")
    return plan_forward(Problem(1, 1, 1, 4096, 4096, args.head_dim), arch.by_name(args.arch), family).tile


def _marked(uses: Sequence[Use], operand: str, instruction: str | None) -> tuple[Phase, ...]:
    """The phases of an operand's access by `instruction`; without one, of its first access that is not cp.async."""
    mine = [use for use in uses if use.operand == operand]
    if instruction is not None:
        mine = [use for use in mine if use.instruction == instruction]
        if not mine:
            known = sorted({use.instruction for use in uses if use.operand == operand})
            raise ValueError(
                f"--instruction {instruction}: the instructions of {operand} are {', '.join(known) or 'not counted'}"
            )
    mine.sort(key=lambda use: use.instruction == "cp.async")
    return mine[0].access.phases if mine else ()


def _kernel(args: argparse.Namespace) -> Subject:
    variants, tiles_of, uses_of = KERNELS[args.kernel]
    if args.variant not in variants:
        raise ValueError(f"--variant {args.variant}: use one of {', '.join(variants)} for {args.kernel}")
    row = _kernel_tile(args)
    uses = {variant: uses_of(replace(row, layout=variant)) for variant in variants}
    phases = _marked(uses[args.variant], args.operand, args.instruction)
    drawn = replace(row, layout=args.variant)
    title = f"{args.operand} of {args.kernel}, head dim {args.head_dim}, {args.arch}: {drawn}"
    return Subject(title, tiles_of(drawn)[args.operand], phases, kernel_table(uses))


def _subject(args: argparse.Namespace) -> Subject:
    if args.kernel:
        return _kernel(args)
    tile = SmemTile(args.rows, args.cols, variant=args.variant)
    phases = ACCESSES[args.access](tile).phases
    return Subject("", tile, phases, conflict_table(args.rows, args.cols))


def _draw(args: argparse.Namespace) -> str:
    """Print a picture, and return the same picture as SVG."""
    if args.draw_rows < 1:
        raise ValueError(f"--draw-rows {args.draw_rows}: must be 1 or more")
    subject = _subject(args)
    num = len(subject.phases)
    if num and not 0 <= args.phase < num:
        raise ValueError(f"--phase {args.phase}: there are the phases 0 to {num - 1}")
    phase = subject.phases[args.phase] if num else None
    if subject.title:
        print(subject.title)
    if args.view == "tile" or phase is None:
        print(text_picture(subject.tile, phase, args.draw_rows, _has_colour(args.color)), end="")
        svg = svg_picture(subject.tile, phase, args.draw_rows)
    else:
        print(text_banks(phase), end="")
        svg = svg_banks(subject.title or f"{args.variant} {args.rows} x {args.cols}, {args.access}", phase)
    if phase is None:
        print(NOT_COUNTED, end="")
    if not args.picture_only:
        print(f"\n{subject.table}", end="")
    return svg


def write_figures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, arguments in FIGURES.items():
        args = _parser().parse_args(arguments.split())
        with redirect_stdout(StringIO()):
            svg = _draw(args)
        (folder / name).write_text(svg, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] and argv[0] in (*STUDIES, "explain"):
        return cli.main(argv)
    args = _parser().parse_args(argv)
    try:
        if args.figures:
            write_figures(args.figures)
            print(f"wrote {len(FIGURES)} figures to {args.figures}")
            return 0
        svg = _draw(args)
        if args.svg:
            args.svg.write_text(svg, encoding="utf-8")
            print(f"\nwrote {args.svg}")
    except (OSError, ValueError) as error:
        print(f"layouts: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
