"""Pictures of a shared-memory tile: the banks of each 16-byte chunk, and the chunks that one phase accesses.

A cell is a chunk of 16 bytes. Its number is the group of four banks that hold it (group g: banks 4g to 4g + 3). A phase
of eight chunks has no conflicts if it accesses every group once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from cute_flash.smem.tile import CHUNK_BYTES, VARIANTS, SmemTile
from layouts.banks import BANK_BYTES, NUM_BANKS, Phase, tile_report
from layouts.kernels import Use
from layouts.layout import layout_of

NUM_GROUPS = NUM_BANKS * BANK_BYTES // CHUNK_BYTES

# Rows after which the groups of every variant repeat.
_PERIOD = 8

# One light colour for each group of banks, and its code among the 256 of a terminal.
GROUP_COLOURS = ("#ffd7d7", "#ffd787", "#ffffaf", "#afffaf", "#afffff", "#afd7ff", "#d7afff", "#bcbcbc")
_ANSI_CODES = (224, 222, 229, 157, 159, 153, 183, 250)


@dataclass(frozen=True)
class _Cell:
    """A chunk of the picture. `threads`: the threads of the marked phase that access it."""

    row: int
    col: int
    group: int
    threads: tuple[int, ...]


def _cells(tile: SmemTile, phase: Phase | None, num_rows: int) -> list[list[_Cell]]:
    # Entries are removed row by row. While some are left, the picture must have more rows.
    threads_at: dict[int, list[int]] = {}
    for thread, address in phase.lanes if phase else ():
        threads_at.setdefault(address // CHUNK_BYTES, []).append(thread)
    grid = []
    for row in range(tile.rows):
        if row >= num_rows and not threads_at:
            break
        cells = []
        for col in range(0, tile.cols, tile.chunk_cols):
            chunk = layout_of(tile)(row, col) * tile.element_bytes // CHUNK_BYTES
            cells.append(_Cell(row, col, chunk % NUM_GROUPS, tuple(threads_at.pop(chunk, ()))))
        grid.append(cells)
    return grid


def _title(tile: SmemTile) -> str:
    return f"{tile.variant} {tile.rows} x {tile.cols}, {tile.element_bytes}-byte elements: {layout_of(tile)}"


def _wavefronts(phase: Phase) -> str:
    return f"{phase.wavefronts} wavefront{'s' if phase.wavefronts > 1 else ''}"


def text_picture(tile: SmemTile, phase: Phase | None = None, num_rows: int = 16, has_colour: bool = False) -> str:
    """The first `num_rows` rows, or more if `phase` needs them. `[g]` marks the chunks that the phase accesses."""
    grid = _cells(tile, phase, num_rows)
    lines = [_title(tile), "cell = 16 bytes, number = group of 4 banks"]
    if phase:
        threads = [thread for thread, _ in phase.lanes]
        lines[-1] += f", [ ] = threads {min(threads)} to {max(threads)} together: {_wavefronts(phase)}"
    lines.append("     col" + "".join(f"{cell.col:4d}" for cell in grid[0]))
    for cells in grid:
        line = f"row {cells[0].row:4d}  "
        for cell in cells:
            text = f"[{cell.group}]" if cell.threads else f" {cell.group} "
            line += f"\x1b[48;5;{_ANSI_CODES[cell.group]};30m{text}\x1b[0m " if has_colour else f"{text} "
        lines.append(line.rstrip())
    if len(grid) < tile.rows:
        lines.append(f"rows {len(grid)} to {tile.rows - 1} repeat the numbers of rows 0 to {_PERIOD - 1}")
    return "\n".join(lines) + "\n"


def _thread_label(threads: tuple[int, ...]) -> str:
    first, last = threads[0], threads[-1]
    return f"t{first}" if first == last else f"t{first}-{last}"


def _svg_head(title: str, caption: str, width: int, height: int) -> tuple[str, ...]:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        f'width="{width}" height="{height}" font-family="monospace" font-size="11" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="20">{escape(title)}</text>',
        f'<text x="16" y="38">{caption}</text>',
    )


def svg_picture(tile: SmemTile, phase: Phase | None = None, num_rows: int = 16) -> str:
    """`text_picture` as SVG: cells coloured by group, the chunks of `phase` framed and labelled with threads."""
    cell_width, cell_height, left, top = 44, 24, 64, 64
    grid = _cells(tile, phase, num_rows)
    # The picture must be as wide as its title, at about 7 units per character.
    width = max(left + cell_width * len(grid[0]) + 16, 32 + 7 * len(_title(tile)))
    height = top + cell_height * len(grid) + 16
    caption = "cell = 16 bytes, number = group of 4 banks"
    if phase:
        caption += f", framed = one phase: {_wavefronts(phase)}"
    lines = [*_svg_head(_title(tile), caption, width, height)]
    for index, cell in enumerate(grid[0]):
        lines.append(f'<text x="{left + cell_width * index + 4}" y="{top - 6}" fill="#606060">{cell.col}</text>')
    framed = []
    for cells in grid:
        y = top + cell_height * cells[0].row
        lines.append(f'<text x="16" y="{y + 16}" fill="#606060">row {cells[0].row}</text>')
        for index, cell in enumerate(cells):
            x = left + cell_width * index
            box = f'<rect x="{x}" y="{y}" width="{cell_width}" height="{cell_height}"'
            lines.append(f'{box} fill="{GROUP_COLOURS[cell.group]}" stroke="#ffffff"/>')
            lines.append(f'<text x="{x + 5}" y="{y + 16}" font-weight="bold">{cell.group}</text>')
            if cell.threads:
                # Drawn last, so that neighbouring cells do not cover the frame.
                framed.append(f'{box} fill="none" stroke="#000000" stroke-width="2"/>')
                label = _thread_label(cell.threads)
                right = x + cell_width - 3
                framed.append(f'<text x="{right}" y="{y + 16}" font-size="8" text-anchor="end">{label}</text>')
    return "\n".join([*lines, *framed, "</svg>"]) + "\n"


def conflict_table(rows: int, cols: int) -> str:
    """Wavefronts and conflicts of every access over a full tile of 2-byte elements, for all variants."""
    tiles = [SmemTile(rows, cols, variant=variant) for variant in VARIANTS]
    reports = [tile_report(tile) for tile in tiles]
    lines = [
        f"{rows} x {cols}, 2-byte elements: wavefronts (conflicts)",
        f"{'access':<16}{'ideal':>8}" + "".join(f"{variant:>16}" for variant in VARIANTS),
    ]
    for name, access in reports[0].items():
        counts = [f"{report[name].wavefronts} ({report[name].conflicts})" for report in reports]
        lines.append(f"{name:<16}{access.ideal:>8}" + "".join(f"{count:>16}" for count in counts))
    lines.append(f"{'bytes':<16}{rows * cols * 2:>8}" + "".join(f"{tile.bytes:>16}" for tile in tiles))
    return "\n".join(lines) + "\n"


def _served(phase: Phase) -> list[list[tuple[int, ...]]]:
    """[wavefront][group of banks] -> the threads that get words."""
    grid: list[list[set[int]]] = [[set() for _ in range(NUM_GROUPS)] for _ in range(phase.wavefronts)]
    for row, delivered in zip(grid, phase.wavefront_words, strict=True):
        for thread, word in delivered:
            row[word // CHUNK_BYTES % NUM_GROUPS].add(thread)
    return [[tuple(sorted(threads)) for threads in row] for row in grid]


def text_banks(phase: Phase) -> str:
    """For each wavefront of a phase, the threads that each group of banks serves."""
    heads = [f"{first}-{first + 3}" for first in range(0, NUM_BANKS, 4)]
    lines = [f"{'banks':<12}" + "".join(f"{head:>8}" for head in heads)]
    for number, row in enumerate(_served(phase)):
        labels = [_thread_label(threads) if threads else "." for threads in row]
        lines.append(f"{f'wavefront {number}':<12}" + "".join(f"{label:>8}" for label in labels))
    return "\n".join(lines) + "\n"


def svg_banks(title: str, phase: Phase) -> str:
    """`text_banks` as SVG: a row per wavefront, a column in the colour of each group of banks."""
    cell_width, cell_height, left, top = 52, 24, 100, 64
    rows = _served(phase)
    width = max(left + cell_width * NUM_GROUPS + 16, 32 + 7 * len(title))
    height = top + cell_height * len(rows) + 16
    lines = [*_svg_head(title, f"banks of 4 bytes, four to a column: {_wavefronts(phase)}", width, height)]
    for group in range(NUM_GROUPS):
        label = f"{4 * group}-{4 * group + 3}"
        x = left + cell_width * group
        lines.append(f'<text x="{x + 4}" y="{top - 6}" fill="#606060">{label}</text>')
    for number, row in enumerate(rows):
        y = top + cell_height * number
        lines.append(f'<text x="16" y="{y + 16}" fill="#606060">wavefront {number}</text>')
        for group, threads in enumerate(row):
            x = left + cell_width * group
            fill = GROUP_COLOURS[group] if threads else "#f4f4f4"
            box = f'<rect x="{x}" y="{y}" width="{cell_width}" height="{cell_height}"'
            lines.append(f'{box} fill="{fill}" stroke="#ffffff"/>')
            if threads:
                lines.append(f'<text x="{x + 5}" y="{y + 16}">{_thread_label(threads)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def kernel_table(uses: Mapping[str, Sequence[Use]]) -> str:
    """Wavefronts and conflicts of the accesses of a CTA, one column per variant. `uses`: variant -> accesses."""
    variants = list(uses)
    lines = [
        "one CTA: wavefronts (conflicts)",
        f"{'access':<16}{'per':<10}{'instr.':>8}" + "".join(f"{variant:>14}" for variant in variants),
    ]
    for same in zip(*uses.values(), strict=True):
        one = same[0]
        counts = "".join(f"{f'{use.once.wavefronts} ({use.once.conflicts})':>14}" for use in same)
        each = "key block" if one.is_per_block else "row tile"
        lines.append(f"{one.name:<16}{each:<10}{one.once.instructions:>8}{counts}")
    return "\n".join(lines) + "\n"
