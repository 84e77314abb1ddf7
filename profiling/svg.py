"""A small writer of SVG: shapes, text and classes, the same bytes every time, on a light and on a dark page.

Colours are classes and never attributes, so that one style sheet has both palettes; the background is painted
too, and a viewer that knows no `prefers-color-scheme` shows the light one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

Point = tuple[float, float]

# Class -> its colour on a light and on a dark page.
SURFACES = {"page": ("#ffffff", "#0d1117"), "panel": ("#f6f8fa", "#161b22")}
TEXTS = {"ink": ("#1f2328", "#e6edf3"), "dim": ("#59636e", "#9198a1")}
GRID = ("#d8dee4", "#30363d")
# Series, distinguishable in both palettes and, by lightness, in grey.
COLOURS = {
    "blue": ("#0550ae", "#79c0ff"),
    "orange": ("#bc4c00", "#ffa657"),
    "green": ("#1a7f37", "#56d364"),
    "purple": ("#8250df", "#d2a8ff"),
    "red": ("#cf222e", "#ff7b72"),
    "grey": ("#6e7781", "#afb8c1"),
    "teal": ("#1b7c83", "#39c5cf"),
    "pink": ("#bf3989", "#f778ba"),
}
# Half of the size of a marker.
MARKER = 3.5


def number(value: float) -> str:
    """A coordinate, rounded to a tenth of a pixel: machines differ in the last digits."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _rules(index: int) -> Iterable[str]:
    yield from (f".{name}{{fill:{pair[index]}}}" for name, pair in {**SURFACES, **TEXTS}.items())
    yield f".grid{{stroke:{GRID[index]}}}"
    for name, pair in COLOURS.items():
        yield f".{name}{{fill:{pair[index]};stroke:{pair[index]}}}"


def style() -> str:
    fixed = (
        "text{font-family:sans-serif;font-size:12px}.big{font-size:15px;font-weight:bold}.bold{font-weight:bold}"
        ".small{font-size:11px}.grid{stroke-width:1}.line{fill:none;stroke-width:1.6}.thick{stroke-width:3}"
        ".dashed{fill:none;stroke-width:1.4;stroke-dasharray:6 4}.hollow{fill:none;stroke-width:1.5}"
        ".faint{fill-opacity:0.35;stroke:none}.bar{stroke:none}"
    )
    light, dark = "".join(_rules(0)), "".join(_rules(1))
    # After both palettes, so that hollow markers stay hollow in either.
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}{fixed}"


class Canvas:
    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{style()}</style>",
        ]
        self.rect(0, 0, width, height, "page")
        self.text(16, 26, title, "ink big")

    def _add(self, name: str, kind: str, **attributes: float | str) -> None:
        pairs = "".join(
            f' {key}="{value if isinstance(value, str) else number(value)}"' for key, value in attributes.items()
        )
        self._lines.append(f'<{name} class="{kind}"{pairs}/>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._add("rect", kind, x=x, y=y, width=width, height=height)

    def line(self, start: Point, end: Point, kind: str) -> None:
        self._add("line", kind, x1=start[0], y1=start[1], x2=end[0], y2=end[1])

    def path(self, points: Sequence[Point], kind: str, closed: bool = False) -> None:
        steps = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._add("path", kind, d=f"M{steps}{'Z' if closed else ''}")

    def text(self, x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> None:
        at = f'x="{number(x)}" y="{number(y)}"'
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._lines.append(f'<text class="{kind}" {at}{place}>{escape(text)}</text>')

    def marker(self, at: Point, shape: str, kind: str) -> None:
        """`shape`: circle, square, diamond, up or down."""
        (x, y), r = at, MARKER
        if shape == "circle":
            self._add("circle", kind, cx=x, cy=y, r=r)
        elif shape == "square":
            self.rect(x - r, y - r, 2 * r, 2 * r, kind)
        else:
            corners = {
                "diamond": ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
                "up": ((0, -1.3), (1.25, 1), (-1.25, 1)),
                "down": ((0, 1.3), (1.25, -1), (-1.25, -1)),
            }[shape]
            self.path([(x + r * dx, y + r * dy) for dx, dy in corners], kind, closed=True)

    def render(self) -> str:
        return "\n".join([*self._lines, "</svg>"]) + "\n"
