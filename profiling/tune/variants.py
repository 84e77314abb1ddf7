"""Variants of a kernel to tune: tiles given as compact strings, or neighbours of rows of the tile tables.

    64: 192x128 s4 q2 c1 t0      fwd_sm90, head dim 64: 192 rows by 128 keys, 4 stages of K and V, 2 of Q,
                                 speculative row max, no ping-pong
    256: 128x64 s2 k1            the same kernel: warpgroups skip blocks in which their rows see no key
    64: 128x64 w4 s2 q4          fwd_sm80: 4 warps, 2 stages, 4 steps of Q in registers
    512: 64x64 w8 s1 p4          fwd_sm80: 4 of the 8 warps share rows
    64: 64x128 s2 p4 k2 q2       bwd_sm80: 2 stages of Q and of dO; 4 of the 8 warps along the keys of P and dS, 2 along
                                 the keys of dK and dV, 2 along the queries of dQ
    64: 128x128 s2 p2 k4 h1      the same with half of the warps for dK, the others for dV; k4: 4 of each half
    64: 128x128 e1               bwd_sm90: the LSE is read early
    256: 64x80 o1 p7             bwd_sm90_wide: 1 stage of dO, 7 pieces of a half of dQ in shared memory
    128: 128x{48,64} s{1,2}      a set: every feasible combination
    128x64 s2                    for every head dim that is tuned; omitted fields have the tile's defaults

The tile is as wide as the head dim, padded to a multiple of 32 (bwd_sm90: 64, bwd_sm90_wide: 256); `d192` makes it
wider.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from cute_flash.planning.launch import LaunchKey
from cute_flash.planning.plan import Plan, plan_backward, plan_forward
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import HALVES, PIECES, BwdTileSm90, BwdTileSm90Wide
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import ceil_div
from cute_flash.spec.problem import Problem
from profiling.measure.shapes import MASKS, Shape

# A tile table may have other rows for short sequences than for long ones. These lengths reach all rows.
SAMPLE_LENGTHS = (1024, 512, 2048, 16384)
# Registers of a thread for accumulators, of 255. More would spill. The backward needs more other registers.
MAX_ACCUMULATORS, MAX_BWD_ACCUMULATORS = 240, 208
# Registers that a Hopper consumer thread needs beside its accumulators. With 28, ptxas spills little or nothing;
# with 24 it serialised wgmma in every tile tried.
SM90_OTHER_REGISTERS = 28

_PREFIX = re.compile(r"\s*(\d+)\s*:(.*)", re.DOTALL)
_SHAPE = re.compile(r"(\d+)x(\d+)")
_FIELD = re.compile(r"([a-z])(\d+)")
_SET = re.compile(r"\{([^{}]*)\}")


class InfeasibleError(ValueError):
    """A well-formed variant that the kernel or the architecture refuses."""


Tile = FwdTileSm80 | FwdTileSm90 | BwdTileSm80 | BwdTileSm90 | BwdTileSm90Wide


class Axis(NamedTuple):
    """A field of a tile: the values to try, ascending, and its letter in the compact form."""

    values: tuple[int, ...] = ()
    letter: str = ""


@dataclass(frozen=True)
class Family:
    """The compact form and the search space of the variants of one kernel.

    The tile class raises `ValueError` for tiles that the kernel does not support.
    """

    kernels: str  # kernel family, as for `use_kernels`
    tile: type[Tile]
    axes: Mapping[str, Axis]  # by field; the letters of the compact form have this order
    has_registers: Callable[[Any], bool] = lambda tile: True  # whether the accumulators leave enough registers
    is_redundant: Callable[[Any], bool] = lambda tile: False  # another tile gives the same kernel, or a faster one
    direction: str = "fwd"
    head_dims: tuple[int, ...] = (64, 128)  # that are tuned by default
    width_step: int = 32  # the width of a tile is a multiple of it

    @property
    def letters(self) -> dict[str, str]:
        """Letter of the compact form -> field of the tile."""
        return {axis.letter: name for name, axis in self.axes.items() if axis.letter}

    @property
    def choices(self) -> dict[str, tuple[int, ...]]:
        """The values of each field to try."""
        return {name: axis.values for name, axis in self.axes.items() if axis.values}

    def is_candidate(self, tile: Tile, arch: ArchSpec) -> bool:
        return tile.fits(arch) and self.has_registers(tile) and not self.is_redundant(tile)

    def plan(self, problem: Problem, arch: ArchSpec, tile: Tile | None = None) -> Plan:
        """The plan of a problem, with the library's tile or another one."""
        plan: Callable[..., Plan] = plan_forward if self.direction == "fwd" else plan_backward
        return plan(problem, arch, family=self.kernels, tile=tile)


FAMILIES = {
    "fwd_sm90": Family(
        kernels="sm90",
        tile=FwdTileSm90,
        axes={
            "tile_m": Axis((64, 128, 192)),
            "tile_n": Axis((64, 80, 96, 112, 128, 144, 160, 176, 192)),
            "stages": Axis((1, 2, 4, 8), "s"),
            "q_stages": Axis((1, 2), "q"),
            "speculative_max": Axis((False, True), "c"),
            "speculative_max_masked": Axis((False, True), "l"),
            "ping_pong": Axis((False, True), "t"),
            "skips_blocks": Axis((False, True), "k"),
            "head_dim": Axis(letter="d"),
        },
        has_registers=lambda tile: tile.accumulator_registers <= tile.registers[1] - SM90_OTHER_REGISTERS,
        # Ping-pong needs two warpgroups; a speculative max in masked blocks alone is not faster.
        is_redundant=lambda tile: (
            (tile.num_warpgroups == 1 and not tile.ping_pong)
            or (tile.speculative_max_masked and not tile.speculative_max)
        ),
    ),
    "fwd_sm80": Family(
        kernels="sm80",
        tile=FwdTileSm80,
        axes={
            "tile_m": Axis((64, 128, 256)),
            "tile_n": Axis((32, 48, 64, 80, 96, 112, 128)),
            "num_warps": Axis((2, 4, 8), "w"),
            "stages": Axis((1, 2), "s"),
            "q_steps": Axis((0, 1, 2, 4, 6, 8, 12, 16), "q"),
            "speculative_max": Axis((False, True), "c"),
            "row_warps": Axis((1, 2, 4), "p"),
            "head_dim": Axis(letter="d"),
        },
        has_registers=lambda tile: tile.accumulator_registers <= MAX_ACCUMULATORS,
    ),
    "bwd_sm80": Family(
        kernels="sm80",
        tile=BwdTileSm80,
        axes={
            "tile_m": Axis((16, 32, 64, 128)),
            "tile_n": Axis((32, 48, 64, 96, 128)),
            "stages": Axis((1, 2), "s"),
            "num_warps": Axis((4, 8), "w"),
            "warps_s": Axis((1, 2, 4, 8), "p"),
            "warps_kv": Axis((1, 2, 4, 8), "k"),
            "splits_kv": Axis((False, True), "h"),
            "splits_s": Axis((False, True), "x"),
            "warps_q": Axis((1, 2, 4, 8), "q"),
            "head_dim": Axis(letter="d"),
        },
        has_registers=lambda tile: tile.accumulator_registers <= MAX_BWD_ACCUMULATORS,
        direction="bwd",
        head_dims=(64, 128, 256),
    ),
    "bwd_sm90": Family(
        kernels="sm90",
        tile=BwdTileSm90,
        axes={
            "tile_m": Axis((64, 128)),
            "tile_n": Axis((128,)),
            "stages": Axis((2,), "s"),
            "early_lse": Axis((False, True), "e"),
            "head_dim": Axis(letter="d"),
        },
        direction="bwd",
        width_step=64,
    ),
    "bwd_sm90_wide": Family(
        kernels="sm90",
        tile=BwdTileSm90Wide,
        axes={
            "tile_m": Axis((64,)),
            "tile_n": Axis((48, 64, 80, 96)),
            "q_stages": Axis((2,), "q"),
            "do_stages": Axis((1, 2), "o"),
            "dq_pieces": Axis((PIECES - 1, PIECES), "p"),
            "dq_products": Axis((HALVES,), "h"),
            "sum_slots": Axis((1,), "m"),
            "head_dim": Axis(letter="d"),
        },
        has_registers=lambda tile: tile.accumulator_registers <= tile.registers[1] - SM90_OTHER_REGISTERS,
        direction="bwd",
        head_dims=(256,),
        width_step=256,
    ),
}


def family_of(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"kernel {name!r}: choose from {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _width(family: Family, head_dim: int) -> int:
    """The width of the narrowest tile for a head dim."""
    return ceil_div(head_dim, family.width_step) * family.width_step


@dataclass(frozen=True)
class Variant:
    """One tile of one kernel, for problems of one head dim."""

    family: str
    head_dim: int
    tile: Tile

    @property
    def text(self) -> str:
        """The compact form without the head dim; the inverse of `parse`."""
        tile, family = self.tile, family_of(self.family)
        defaults = {f.name: f.default for f in fields(tile)} | {"head_dim": _width(family, self.head_dim)}
        parts = [
            f"{letter}{int(getattr(tile, name))}"
            for letter, name in family.letters.items()
            if getattr(tile, name) != defaults[name]
        ]
        return " ".join([f"{tile.tile_m}x{tile.tile_n}", *parts])

    def __str__(self) -> str:
        return f"{self.head_dim}: {self.text}"

    def plan(self, problem: Problem, arch: ArchSpec) -> Plan:
        return family_of(self.family).plan(problem, arch, self.tile)

    def check_fits(self, arch: ArchSpec) -> None:
        """Raise `InfeasibleError` if the tile needs more shared memory than a CTA can have."""
        if not self.tile.fits(arch):
            needed, limit = self.tile.smem_bytes / 1024, arch.smem_per_cta / 1024
            raise InfeasibleError(
                f"variant '{self}': {needed:.0f} KB of shared memory, {arch.name} has {limit:.0f} KB a CTA"
            )


def sample_problem(head_dim: int, mask: str, dtype: str, length: int = SAMPLE_LENGTHS[0]) -> Problem:
    """A problem of this head dim and mask. With a given tile, all lengths have the same kernels."""
    return Shape(1, 1, 1, length, head_dim, mask == "causal").problem(dtype)


def forward_keys(
    family: str, head_dims: Iterable[int], masks: Sequence[str], dtype: str, arch: ArchSpec
) -> list[LaunchKey]:
    """The kernels of the forward pass before a backward of this family; none for a forward family."""
    known = family_of(family)
    if known.direction == "fwd":
        return []
    problems = (sample_problem(*one) for one in itertools.product(head_dims, masks, (dtype,), SAMPLE_LENGTHS))
    return list(dict.fromkeys(key for one in problems for key in plan_forward(one, arch, known.kernels).host_calls))


def table_rows(family: str, head_dim: int, arch: ArchSpec, masks: Sequence[str] = MASKS) -> list[Variant]:
    """The tiles that the library chooses: often one for all masks and lengths."""
    known = family_of(family)
    names = {"tile_m", "tile_n", *known.letters.values()}
    rows = []
    for mask, length in itertools.product(masks, SAMPLE_LENGTHS):
        tile = known.plan(sample_problem(head_dim, mask, "bf16", length), arch).tile
        if not isinstance(tile, known.tile):
            raise ValueError(f"{family} has no tile for head dim {head_dim}")
        # Without the fields of a table row that are not part of the tile: its conditions and its measurement.
        values: dict[str, Any] = {name: getattr(tile, name) for name in names}
        rows.append(Variant(family, head_dim, known.tile(**values)))
    return list(dict.fromkeys(rows))


def parse(text: str, family: str, head_dim: int) -> Variant:
    """A variant from its compact form, without the prefix of the head dim."""
    known = family_of(family)
    pairs = list(_values(text, known))
    values: dict[str, Any] = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"variant {text!r}: a field is given twice")
    values.setdefault("head_dim", _width(known, head_dim))
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
            # The digest of a compile key is that of its text, in which True and 1 differ.
            yield name, bool(value) if name in flags else value
        else:
            raise ValueError(
                f"variant {text!r}: {part!r} is neither a shape such as 128x64, "
                f"nor a number after one of {', '.join(family.letters)}, nor a file"
            )


def expand(text: str) -> list[str]:
    """Every combination of the sets `{a,b}` in a text."""
    match = _SET.search(text)
    if match is None:
        return [text]
    head, tail = text[: match.start()], text[match.end() :]
    return [part for value in match[1].split(",") for part in expand(head + value.strip() + tail)]


@dataclass(frozen=True)
class VariantExpr:
    """A compact form with or without sets, for one head dim or for all."""

    head_dim: int | None
    text: str

    def variants(self, family: str, head_dim: int, arch: ArchSpec) -> list[Variant]:
        """The feasible variants of a set; `InfeasibleError` if the expression is a single infeasible variant."""
        texts = expand(self.text)
        variants = []
        for text in texts:
            try:
                variant = parse(text, family, head_dim)
                variant.check_fits(arch)
            except InfeasibleError:
                if len(texts) == 1:
                    raise
            else:
                variants.append(variant)
        return variants


def read(sources: Iterable[str]) -> list[VariantExpr]:
    """The expressions of files (one per line, # begins a comment) and of arguments (separated by ;)."""
    lines: list[str] = []
    for source in sources:
        # `Path.is_file` raises for expressions that are too long for a file name.
        is_file = os.path.isfile(source)
        lines += Path(source).read_text().splitlines() if is_file else source.split(";")
    exprs = []
    for line in lines:
        text = line.partition("#")[0].strip()
        prefix = _PREFIX.fullmatch(text)
        if text:
            exprs.append(VariantExpr(int(prefix[1]), prefix[2].strip()) if prefix else VariantExpr(None, text))
    return exprs


def neighbours(rows: Sequence[Variant], arch: ArchSpec) -> list[Variant]:
    """The rows of one head dim, then the feasible tiles around them, by distance (`_steps`) to the nearest row."""
    family = family_of(rows[0].family)
    distances = dict.fromkeys(rows, 0)
    for row in rows:
        choices = {name: _with(values, getattr(row.tile, name)) for name, values in family.choices.items()}
        for values in itertools.product(*choices.values()):
            chosen: dict[str, Any] = dict(zip(choices, values, strict=True))
            try:
                tile = family.tile(head_dim=row.tile.head_dim, **chosen)
            except ValueError:
                continue
            if family.is_candidate(tile, arch):
                variant, steps = replace(row, tile=tile), _steps(tile, row.tile, choices)
                distances[variant] = min(steps, distances.get(variant, steps))
    return sorted(distances, key=lambda variant: (distances[variant], variant.text))


def _with(values: Sequence[int], value: int) -> tuple[int, ...]:
    return tuple(sorted({*values, value}))


def _steps(tile: Tile, row: Tile, choices: Mapping[str, tuple[int, ...]]) -> int:
    """The distance of two tiles: over all fields, the sum of distances in the field's list of choices."""
    return sum(
        abs(values.index(getattr(tile, name)) - values.index(getattr(row, name))) for name, values in choices.items()
    )


@dataclass(frozen=True)
class Selection:
    """The variants of `sources`, or without sources the neighbours of the tile table's rows."""

    sources: tuple[str, ...] = ()
    head_dims: tuple[int, ...] | None = None  # None: those that the sources name
    masks: tuple[str, ...] = MASKS
    max_neighbours: int = 30  # of a head dim, including the rows; `sources` are not limited


def choose(selection: Selection, family: str, arch: ArchSpec) -> list[Variant]:
    """The variants to tune; those of each head dim begin with the tile table's rows."""
    exprs = read(selection.sources)
    named = list(dict.fromkeys(expr.head_dim for expr in exprs if expr.head_dim is not None))
    chosen: list[Variant] = []
    for head_dim in selection.head_dims or named or family_of(family).head_dims:
        rows = table_rows(family, head_dim, arch, selection.masks)
        if not exprs:
            chosen += neighbours(rows, arch)[: max(selection.max_neighbours, len(rows))]
            continue
        mine = [expr for expr in exprs if expr.head_dim in (None, head_dim)]
        chosen += [*rows, *(variant for expr in mine for variant in expr.variants(family, head_dim, arch))]
    return list(dict.fromkeys(chosen))
