"""The instructions of a cubin with the scoreboards that they set and wait for, from `nvdisasm -hex`.

A variable-latency instruction, such as a load, sets one of six scoreboards when it completes. An instruction that needs
the result waits for that scoreboard. Both numbers are control bits of the 128-bit encoding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from cute_flash.jit.resources import disassemble

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* (0x[0-9a-f]{16}) \*/")
_SECOND_HALF = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/")
_LABEL, _TARGET = re.compile(r"^(\.L\w+):"), re.compile(r"^BRA.*`\((\.L\w+)\)")
_GUARD = re.compile(r"^@!?U?P\w+\s+")
NUM_SCOREBOARDS = 6
NONE = 7  # the instruction sets no scoreboard
# Positions of the control bits in the second half of an encoding.
_SETS, _WAITS = 46, 52


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str  # without the guard predicate
    sets: int  # scoreboard that it sets when its result has arrived, or NONE
    waits: frozenset[int]  # scoreboards that it waits for
    jumps_back: bool = False  # to a label before it

    @property
    def opcode(self) -> str:
        return self.text.split()[0]


def instructions(cubin: bytes) -> list[Instruction]:
    return list(_parse(disassemble(cubin, "-hex").splitlines()))


def _parse(lines: list[str]) -> Iterator[Instruction]:
    labels: set[str] = set()
    for line, following in pairwise(lines):
        if label := _LABEL.match(line):
            labels.add(label[1])
        first, second = _LINE.search(line), _SECOND_HALF.search(following)
        if first is not None and second is not None:
            bits = int(second[1], 16)
            waits = frozenset(i for i in range(NUM_SCOREBOARDS) if bits >> (_WAITS + i) & 1)
            text = _GUARD.sub("", first[2])
            target = _TARGET.search(text)
            yield Instruction(int(first[1], 16), text, bits >> _SETS & 7, waits, bool(target and target[1] in labels))


def loads_before_arrivals(code: list[Instruction], is_load: re.Pattern[str]) -> list[tuple[Instruction, Instruction]]:
    """(load, arrival) of every mbarrier arrival that may happen before the data of an earlier load has arrived.

    Loads are those whose opcode matches `is_load`. Loads of a warp complete in order, so of several loads only the last
    one may set a scoreboard. Instructions are taken in the order of their addresses. A jump back with pending loads
    counts as an arrival, because the code there is not followed.
    """
    pending: dict[int, list[Instruction]] = {NONE: []}
    found = []
    for one in code:
        for scoreboard in one.waits:
            pending.pop(scoreboard, None)
        if one.opcode.startswith("SYNCS.ARRIVE") or one.jumps_back:
            found += [(load, one) for loads in pending.values() for load in loads]
        if is_load.match(one.opcode):
            if one.sets != NONE:
                pending.setdefault(one.sets, []).extend(pending.pop(NONE))
                pending[NONE] = []
            pending[one.sets].append(one)
    return found
