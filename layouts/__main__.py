"""`python -m layouts`: the picture of a tile of shared memory, and its bank conflicts beside other variants'.

With --kernel, a tile as the kernel has it, and all that the kernel does to shared memory.
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
from layouts.banks import ACCESSES, Phase
from layouts.draw import conflict_table, kernel_table, svg_banks, svg_picture, text_banks, text_picture
from layouts.kernels import Use, sm80_tiles, sm80_uses, sm90_tiles, sm90_uses

# Kernel -> its variants; tiles and uses of a row of its table of tiles.
Kernel = tuple[tuple[str, ...], Callable[[Any], dict[str, SmemTile]], Callable[[Any], tuple[Use, ...]]]
KERNELS: dict[str, Kernel] = {
    "fwd-sm80": (VARIANTS, sm80_tiles, sm80_uses),
    "fwd-sm90": (HOPPER_VARIANTS, sm90_tiles, sm90_uses),
}
OPERANDS = ("Q", "K", "V", "O")
# Those of README.md, each with the arguments that draw it.
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
    """What is drawn, and the table under it."""

    title: str
    tile: SmemTile
    phases: tuple[Phase, ...]
    table: str


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="layouts", description=__doc__)
    add = parser.add_argument
    every = tuple(dict.fromkeys(VARIANTS + HOPPER_VARIANTS))
    add("--rows", type=int, default=64, help="rows of the tile (default: %(default)s)")
    add("--cols", type=int, default=64, help="columns of 2-byte elements (default: %(default)s)")
    add("--variant", choices=every, default="swizzled", help="what to draw (default: %(default)s)")
    add("--access", choices=ACCESSES, default="ldmatrix_a", help="what to mark (default: %(default)s)")
    add("--kernel", choices=KERNELS, help="instead of --rows, --cols and --access")
    add("--operand", choices=OPERANDS, default="K", help="of the kernel (default: %(default)s)")
    add("--instruction", help="of the kernel on the operand, such as cp.async (default: what reads it)")
    add("--head-dim", type=int, default=128, help="of the kernel (default: %(default)s)")
    add("--arch", default="sm_90", help="whose tile it is (default: %(default)s)")
    add("--phase", type=int, default=0, help="which phase of the access to mark (default: %(default)s)")
    add("--view", choices=("tile", "banks"), default="tile", help="the tile, or the banks in time")
    add("--draw-rows", type=int, default=16, help="rows in the picture (default: %(default)s)")
    add("--color", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal")
    add("--picture-only", action="store_true", help="leave out the table of conflicts")
    add("--svg", type=Path, metavar="FILE", help="write the picture as SVG too")
    add("--figures", type=Path, metavar="DIR", help="only write the figures of README.md")
    return parser


def _has_colour(choice: str) -> bool:
    if choice == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return choice == "always"


def _kernel_tile(args: argparse.Namespace) -> Any:
    """The row of the kernel's table of tiles."""
    family = args.kernel.removeprefix("fwd-")
    return plan_forward(Problem(1, 1, 1, 4096, 4096, args.head_dim), arch.by_name(args.arch), family).tile


def _marked(uses: Sequence[Use], operand: str, instruction: str | None) -> tuple[Phase, ...]:
    """The phases of the first use of an operand that is asked for: reads before writes."""
    mine = [use for use in uses if use.operand == operand]
    if instruction is not None:
        mine = [use for use in mine if use.instruction == instruction]
        if not mine:
            known = sorted({use.instruction for use in uses if use.operand == operand})
            raise ValueError(f"--instruction {instruction}: {operand} has {', '.join(known) or 'none'}")
    mine.sort(key=lambda use: use.instruction == "cp.async")
    return mine[0].access.phases if mine else ()


def _kernel(args: argparse.Namespace) -> Subject:
    variants, tiles_of, uses_of = KERNELS[args.kernel]
    if args.variant not in variants:
        raise ValueError(f"--variant {args.variant}: {args.kernel} has {', '.join(variants)}")
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
    """Print, and return the same as SVG."""
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
