"""Which variants of a kernel are tried: written as compact strings, or found around a row of the tile table.

    64: 192x128 s4 q2 c1 t0      fwd_sm90, head dim 64: 192 rows by 128 keys, 4 stages of K and V, 2 of Q,
                                 speculative row max, no ping-pong
    64: 128x64 w4 s2 q4          fwd_sm80: 4 warps, 2 stages, 4 steps of Q kept
    128: 128x{48,64} s{1,2}      a set: every combination that is feasible
    128x64 s2                    of every head dim that is tuned; a field left out has the tile's default

The tile is as wide as the head dim, padded to a multiple of 32; `d192` makes it wider.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from cute_flash.planning.plan import Plan, plan
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import ceil_div
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Problem
from profiling.suites import MASKS, Shape

DEFAULT_HEAD_DIMS = (64, 128)
WIDTH_STEP = 32
# A table may have other rows for short sequences than for long ones: lengths that see all of them.
SAMPLE_LENGTHS = (1024, 2048, 16384)
# Of the 255 registers of a thread; the rest is for addresses and what is in flight. More would spill.
MAX_ACCUMULATORS = 240
# What a thread that multiplies on Hopper needs besides. With 28 left, ptxas spills little or nothing; with 24
# it serialises wgmma, in every tile that was tried.
SM90_OTHER_REGISTERS = 28

_PREFIX = re.compile(r"\s*(\d+)\s*:(.*)", re.DOTALL)
_SHAPE = re.compile(r"(\d+)x(\d+)")
_FIELD = re.compile(r"([a-z])(\d+)")
_SET = re.compile(r"\{([^{}]*)\}")


class InfeasibleError(ValueError):
    """A well-formed variant that the kernel or the architecture refuses."""


Tile = FwdTileSm80 | FwdTileSm90


@dataclass(frozen=True)
class Family:
    """How the variants of one kernel are written and found.

    Its tile has `head_dim`, `tile_m` and `tile_n`, refuses what the kernel cannot do with `ValueError`, and
    knows `smem_bytes`, `accumulator_registers` and `fits(arch)`.
    """

    kernels: str  # as `use_kernels` takes it
    tile: type[FwdTileSm80] | type[FwdTileSm90]
    letters: Mapping[str, str]  # of the compact form, each with the field of the tile that it sets
    choices: Mapping[str, tuple[int, ...]]  # values of each field worth trying, in ascending order
    max_accumulators: Callable[[Any], int]  # registers of a thread for them, by tile
    is_redundant: Callable[[Any], bool] = lambda tile: False  # another tile is the same kernel

    def is_worth_trying(self, tile: Tile, arch: ArchSpec) -> bool:
        has_room = tile.fits(arch) and tile.accumulator_registers <= self.max_accumulators(tile)
        return has_room and not self.is_redundant(tile)


FAMILIES = {
    "fwd_sm90": Family(
        kernels="sm90",
        tile=FwdTileSm90,
        letters={
            "s": "stages",
            "q": "q_stages",
            "c": "speculative_max",
            "l": "speculative_max_masked",
            "t": "ping_pong",
            "d": "head_dim",
        },
        choices={
            "tile_m": (64, 128, 192),
            "tile_n": (64, 80, 96, 112, 128, 144, 160, 176, 192),
            "stages": (1, 2, 4, 8),
            "q_stages": (1, 2),
            "speculative_max": (False, True),
            "speculative_max_masked": (False, True),
            "ping_pong": (False, True),
        },
        max_accumulators=lambda tile: tile.registers[1] - SM90_OTHER_REGISTERS,
        # One warpgroup has no partner for ping-pong; a speculative max in masked blocks only gains nothing.
        is_redundant=lambda tile: (
            (tile.num_warpgroups == 1 and not tile.ping_pong)
            or (tile.speculative_max_masked and not tile.speculative_max)
        ),
    ),
    "fwd_sm80": Family(
        kernels="sm80",
        tile=FwdTileSm80,
        letters={"w": "num_warps", "s": "stages", "q": "q_steps", "d": "head_dim"},
        choices={
            "tile_m": (64, 128, 256),
            "tile_n": (32, 48, 64, 80, 96, 112, 128),
            "num_warps": (2, 4, 8),
            "stages": (1, 2),
            "q_steps": (0, 1, 2, 4, 6, 8, 12, 16),
        },
        max_accumulators=lambda tile: MAX_ACCUMULATORS,
    ),
}


def family_of(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"kernel {name!r}: choose from {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _width(head_dim: int) -> int:
    return ceil_div(head_dim, WIDTH_STEP) * WIDTH_STEP


@dataclass(frozen=True)
class Variant:
    """One tile of one kernel, for problems of one head dim."""

    family: str
    head_dim: int
    tile: Tile

    @property
    def text(self) -> str:
        """The compact form without its head dim; `parse` reads it back."""
        tile = self.tile
        defaults = {f.name: f.default for f in fields(tile)} | {"head_dim": _width(self.head_dim)}
        told = [
            f"{letter}{int(getattr(tile, name))}"
            for letter, name in family_of(self.family).letters.items()
            if getattr(tile, name) != defaults[name]
        ]
        return " ".join([f"{tile.tile_m}x{tile.tile_n}", *told])

    def __str__(self) -> str:
        return f"{self.head_dim}: {self.text}"

    def plan(self, problem: Problem, arch: ArchSpec) -> Plan:
        with use_kernels(family_of(self.family).kernels):
            return replace(plan(problem, arch), tile=self.tile)

    def obstacle(self, arch: ArchSpec) -> str | None:
        """Why no GPU of this architecture can launch it, or None."""
        if self.tile.fits(arch):
            return None
        needed, there = self.tile.smem_bytes / 1024, arch.smem_per_block / 1024
        return f"{needed:.0f} KB of shared memory, {arch.name} has {there:.0f} KB a block"


def sample_problem(head_dim: int, mask: str, dtype: str, length: int = SAMPLE_LENGTHS[0]) -> Problem:
    """One for all that share a kernel: lengths and heads are no part of what is compiled."""
    return Shape(1, 1, 1, length, head_dim, mask == "causal").problem(dtype)


def table_rows(family: str, head_dim: int, arch: ArchSpec, masks: Sequence[str] = MASKS) -> list[Variant]:
    """What the library would run: often one tile for all masks and lengths."""
    known = family_of(family)
    names = {"tile_m", "tile_n", *known.letters.values()}
    found = []
    for mask, length in itertools.product(masks, SAMPLE_LENGTHS):
        with use_kernels(known.kernels):
            tile = plan(sample_problem(head_dim, mask, "bf16", length), arch).tile
        # Only what decides the kernel: a row also says when it is taken, and why.
        values: dict[str, Any] = {name: getattr(tile, name) for name in names}
        found.append(Variant(family, head_dim, known.tile(**values)))
    return list(dict.fromkeys(found))


def parse(text: str, family: str, head_dim: int) -> Variant:
    """A variant from its compact form, without the prefix that names the head dim."""
    known = family_of(family)
    given = list(_values(text, known))
    values: dict[str, Any] = dict(given)
    if len(values) < len(given):
        raise ValueError(f"variant {text!r}: something is given twice")
    values.setdefault("head_dim", _width(head_dim))
    letters = {name: f"{letter} ({name})" for letter, name in known.letters.items()}
    required = [f.name for f in fields(known.tile) if f.default is MISSING]
    if missing := [letters.get(name, name) for name in required if name not in values]:
        raise ValueError(f"variant {text!r}: {', '.join(missing)} missing")
    if values["head_dim"] < head_dim:
        raise ValueError(f"variant {text!r}: width {values['head_dim']} is less than head dim {head_dim}")
    try:
        return Variant(family, head_dim, known.tile(**values))
    except (ValueError, ZeroDivisionError) as error:
        raise InfeasibleError(f"variant {text!r}: {error}") from error


def _values(text: str, family: Family) -> Iterator[tuple[str, int]]:
    flags = {f.name for f in fields(family.tile) if isinstance(f.default, bool)}
    for part in text.split():
        if shape := _SHAPE.fullmatch(part):
            yield "tile_m", int(shape[1])
            yield "tile_n", int(shape[2])
        elif (one := _FIELD.fullmatch(part)) and one[1] in family.letters:
            name, value = family.letters[one[1]], int(one[2])
            if name in flags and value > 1:
                raise ValueError(f"variant {text!r}: {part!r}: {name} is 0 or 1")
            # A flag is a flag in the compile key too: True and 1 are equal, but not the same text.
            yield name, bool(value) if name in flags else value
        else:
            raise ValueError(
                f"variant {text!r}: {part!r} is no shape such as 128x64, "
                f"no number after one of {', '.join(family.letters)}, and no file"
            )


def expand(text: str) -> list[str]:
    """Every combination of the sets `{a,b}` in a text."""
    found = _SET.search(text)
    if found is None:
        return [text]
    head, tail = text[: found.start()], text[found.end() :]
    return [one for value in found[1].split(",") for one in expand(head + value.strip() + tail)]


@dataclass(frozen=True)
class Written:
    """One entry of a list of variants: for its own head dim, or for all."""

    head_dim: int | None
    text: str

    def variants(self, family: str, head_dim: int, arch: ArchSpec) -> list[Variant]:
        """What can run of it. Nobody writes a variant alone to see it left out: that is an error."""
        texts = expand(self.text)
        found = []
        for text in texts:
            try:
                found.append(_launchable(parse(text, family, head_dim), arch))
            except InfeasibleError:
                if len(texts) == 1:
                    raise
        return found


def _launchable(variant: Variant, arch: ArchSpec) -> Variant:
    if obstacle := variant.obstacle(arch):
        raise InfeasibleError(f"variant '{variant}': {obstacle}")
    return variant


def read(sources: Iterable[str]) -> list[Written]:
    """The entries of files (one in a line, # begins a comment) and of expressions (; between entries)."""
    lines: list[str] = []
    for source in sources:
        # `Path.is_file` refuses what is too long for a name, as an expression may be.
        is_file = os.path.isfile(source)
        lines += Path(source).read_text().splitlines() if is_file else source.split(";")
    written = []
    for line in lines:
        text = line.partition("#")[0].strip()
        prefix = _PREFIX.fullmatch(text)
        if text:
            written.append(Written(int(prefix[1]), prefix[2].strip()) if prefix else Written(None, text))
    return written


def around(rows: Sequence[Variant], arch: ArchSpec) -> list[Variant]:
    """Feasible neighbours of rows of one head dim, themselves first, then by the steps to the nearest row."""
    family = family_of(rows[0].family)
    found = dict.fromkeys(rows, 0)
    for row in rows:
        choices = {name: _with(values, getattr(row.tile, name)) for name, values in family.choices.items()}
        for values in itertools.product(*choices.values()):
            chosen: dict[str, Any] = dict(zip(choices, values, strict=True))
            try:
                tile = family.tile(head_dim=row.tile.head_dim, **chosen)
            except ValueError:
                continue
            if family.is_worth_trying(tile, arch):
                variant, steps = replace(row, tile=tile), _steps(tile, row.tile, choices)
                found[variant] = min(steps, found.get(variant, steps))
    return sorted(found, key=lambda variant: (found[variant], variant.text))


def _with(values: Sequence[int], value: int) -> tuple[int, ...]:
    return tuple(sorted({*values, value}))


def _steps(tile: Tile, row: Tile, choices: Mapping[str, tuple[int, ...]]) -> int:
    """How far two tiles lie apart, in places of the lists of choices."""
    return sum(
        abs(values.index(getattr(tile, name)) - values.index(getattr(row, name)))
        for name, values in choices.items()
    )


@dataclass(frozen=True)
class Wanted:
    """What was asked for: variants that `sources` name, or else neighbours of the table's rows."""

    sources: tuple[str, ...] = ()
    head_dims: tuple[int, ...] | None = None  # None: those that the sources name
    masks: tuple[str, ...] = MASKS
    most: int = 30  # neighbours of a head dim, the rows among them; what is written is taken whole


def choose(wanted: Wanted, family: str, arch: ArchSpec) -> list[Variant]:
    """What to try, the table's rows of each head dim first."""
    written = read(wanted.sources)
    named = list(dict.fromkeys(one.head_dim for one in written if one.head_dim is not None))
    chosen: list[Variant] = []
    for head_dim in wanted.head_dims or named or DEFAULT_HEAD_DIMS:
        rows = table_rows(family, head_dim, arch, wanted.masks)
        if not written:
            chosen += around(rows, arch)[: max(wanted.most, len(rows))]
            continue
        mine = [one for one in written if one.head_dim in (None, head_dim)]
        chosen += [*rows, *(v for one in mine for v in one.variants(family, head_dim, arch))]
    return list(dict.fromkeys(chosen))
