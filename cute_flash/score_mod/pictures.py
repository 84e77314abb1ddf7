"""`draw`: pictures of a mask and its block mask, as text and as SVG."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from xml.sax.saxutils import escape

import torch
from torch import Tensor

from cute_flash.score_mod.block_mask import EMPTY, FULL, PARTIAL, BlockMask, visible_pairs
from cute_flash.score_mod.trace import bind

# The colour of a block by status: an ANSI 256-colour code, and the same colour for SVG.
_COLOURS = {EMPTY: (255, "#eeeeee"), PARTIAL: (229, "#ffffaf"), FULL: (157, "#afffaf")}
# The colour of a visible (query, key) pair in a block, by status.
_VISIBLE = {PARTIAL: "#d7af5f", FULL: "#5faf5f"}
_NAMES = {FULL: "full", PARTIAL: "partial", EMPTY: "empty"}


@dataclass(frozen=True, eq=False)
class _Picture:
    visible: Tensor  # (Sq, Sk)
    status: Tensor  # (query blocks, K/V blocks)
    tile: tuple[int, int]
    title: str

    @property
    def caption(self) -> str:
        counts = [f"{int((self.status == value).sum())} {name}" for value, name in _NAMES.items()]
        share = float(self.visible.double().mean()) if self.visible.numel() else 0.0
        sizes = f"{self.visible.shape[0]} queries x {self.visible.shape[1]} keys"
        return f"{sizes}, blocks of {self.tile[0]} x {self.tile[1]}: {', '.join(counts)}; {share:.0%} visible"


def draw(
    mask_mod: Callable | None,
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    tile: tuple[int, int] = (8, 8),
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    place: tuple[int, int] = (0, 0),
    title: str = "",
    as_svg: bool = False,
    has_colour: bool = False,
) -> str:
    """Draw a mask and its block mask as text or as SVG. Rows are queries, columns are keys.

    In text, `#` is a visible pair in a full block, `+` is a visible pair and `.` a masked pair in a partial block, and
    empty blocks are blank.

    Args:
        mask_mod: The mask; None: the window alone.
        seqlen_q: The number of queries.
        seqlen_k: The number of keys; `seqlen_q` by default.
        tile: The queries and keys of a block.
        causal: As for `attn`.
        window: As for `attn`.
        place: The (b, h) to draw.
        title: The title; the name of the mask_mod by default.
        as_svg: Return SVG instead of text.
        has_colour: Colour the blocks of text with ANSI codes.

    Returns:
        The picture as text, or the source of an SVG file.

    Examples:
        >>> from cute_flash import masks
        >>> print(masks.draw(None, 4, tile=(2, 2), window=(1, 0), title="window of 2"), end="")
        window of 2: 4 queries x 4 keys, blocks of 2 x 2: 0 full, 3 partial, 1 empty; 44% visible
           0 +.
             ++
           2 .++.
             ..++
    """
    window = window[0], 0 if causal else window[1]
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    mask = None if mask_mod is None else bind(mask_mod, "mask_mod")
    device = mask.captures[0].device if mask is not None and mask.captures else torch.device("cpu")
    rows, keys = (torch.arange(n, device=device) for n in (seqlen_q, seqlen_k))
    visible = visible_pairs(mask, window, rows, keys, (seqlen_q, seqlen_k), place)
    shape = (place[0] + 1, place[1] + 1, seqlen_q, seqlen_k)
    status = BlockMask.of(mask_mod, shape, tile=tile, window=window, device=device).status
    b, h = (min(i, n - 1) for i, n in zip(place, status.shape))
    title = title or getattr(mask_mod, "__qualname__", "mask").partition(".<locals>")[0]
    picture = _Picture(visible.cpu(), status[b, h].cpu(), tile, title)
    return _svg(picture) if as_svg else _text(picture, has_colour)


def _text(picture: _Picture, has_colour: bool) -> str:
    (tile_m, tile_n), signs = picture.tile, {FULL: ("#", "#"), PARTIAL: (".", "+"), EMPTY: (" ", " ")}
    lines = [f"{picture.title}: {picture.caption}"]
    for i, row in enumerate(picture.visible.tolist()):
        line = f"{i:4d} " if i % tile_m == 0 else " " * 5
        for n, status in enumerate(picture.status[i // tile_m].tolist()):
            part = "".join(signs[status][x] for x in row[n * tile_n : (n + 1) * tile_n])
            line += f"\x1b[48;5;{_COLOURS[status][0]};30m{part}\x1b[0m" if has_colour else part
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def _svg(picture: _Picture) -> str:
    (tile_m, tile_n), (sq, sk) = picture.tile, picture.visible.shape
    cell = max(2, min(12, 384 // max(sq, sk, 1)))
    left, top, title = 48, 72, picture.title
    width = max(left + cell * sk + 16, 32 + 7 * max(len(title), len(picture.caption)))
    height = top + cell * sq + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        f'width="{width}" height="{height}" font-family="monospace" font-size="11" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="20">{escape(title)}</text>',
        f'<text x="16" y="38">{escape(picture.caption)}</text>',
    ]
    for n in range(0, sk, tile_n):
        lines.append(f'<text x="{left + cell * n}" y="{top - 6}" font-size="9" fill="#606060">{n}</text>')
    for m, blocks in enumerate(picture.status.tolist()):
        y = top + cell * m * tile_m
        lines.append(f'<text x="16" y="{y + 10}" font-size="9" fill="#606060">{m * tile_m}</text>')
        for n, status in enumerate(blocks):
            rows, keys = min(tile_m, sq - m * tile_m), min(tile_n, sk - n * tile_n)
            box = f'x="{left + cell * n * tile_n}" y="{y}" width="{cell * keys}" height="{cell * rows}"'
            fill = _VISIBLE[FULL] if status == FULL else _COLOURS[status][1]
            lines.append(f'<rect {box} fill="{fill}" stroke="#ffffff"/>')
    lines += _runs(picture, cell, left, top)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _runs(picture: _Picture, cell: int, left: int, top: int) -> list[str]:
    """The visible pairs of partial blocks, with neighbours in a row merged into one box."""
    tile_m, tile_n = picture.tile
    boxes = []
    for i, row in enumerate(picture.visible.tolist()):
        blocks = picture.status[i // tile_m].tolist()
        is_drawn = (x and blocks[j // tile_n] == PARTIAL for j, x in enumerate(row))
        for run in re.finditer("#+", "".join("#" if x else " " for x in is_drawn)):
            box = f'x="{left + cell * run.start()}" y="{top + cell * i}" width="{cell * len(run[0])}"'
            boxes.append(f'<rect {box} height="{cell}" fill="{_VISIBLE[PARTIAL]}"/>')
    return boxes
