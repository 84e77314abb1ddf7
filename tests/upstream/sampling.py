"""A fixed sample of the cases of a parametrized test, from its parametrize marks.

pytest would need minutes to collect all cases.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Any text. The same text gives the same cases, whose results can be compared between versions.
SEED = "first sample"
# Cases of a group differ in these parameters only, and so share most of their kernels.
LENGTHS = {"seqlen", "seqlen_q", "seqlen_k", "swap_sq_sk", "seqlen_new_eq_seqlen_q"}
MAX_TRIES = 20_000

Params = dict[str, Any]
Excluded = Callable[[Params], str | None]  # the reason why a case is not sampled, or None
Axis = tuple[tuple[str, ...], list]  # the names and values of one parametrize mark


@dataclass(frozen=True)
class Case:
    file: str
    test: str
    id: str  # as pytest writes it
    params: Params
    group: int

    def __str__(self) -> str:
        return f"{self.file}::{self.test}[{self.id}]"


def axes_of(function: Callable[..., Any]) -> list[Axis]:
    """The parametrize marks of a test, in the order of its ids."""
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    return [(_names(mark.args[0]), list(mark.args[1])) for mark in marks]


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(x.strip() for x in names.split(",")) if isinstance(names, str) else tuple(names)


def _case(axes: Sequence[Axis], choice: Sequence[int]) -> tuple[str, Params]:
    """The id and the parameters of one value of each axis."""
    params: Params = {}
    ids = []
    for (names, values), i in zip(axes, choice):
        row = zip(names, (values[i],) if len(names) == 1 else values[i])
        for name, value in row:
            params[name] = value
            ids.append(str(value) if isinstance(value, (str, int, float, type(None))) else f"{name}{i}")
    return "-".join(ids), params


def sample(file: str, test: str, axes: Sequence[Axis], size: int, per_group: int, excluded: Excluded) -> Iterator[Case]:
    """Up to `size` cases: random groups with `per_group` combinations of lengths each."""
    rng = random.Random(f"{SEED}/{file}/{test}")
    is_length = [bool(LENGTHS & set(names)) for names, _ in axes]
    groups: set[tuple[int, ...]] = set()
    taken: set[str] = set()
    number = 0
    for attempt in range(MAX_TRIES):
        base = [rng.randrange(len(values)) for _, values in axes]
        group = tuple(i for i, length in zip(base, is_length) if not length)
        # A test with few groups uses them again after half of the tries.
        if group in groups and attempt < MAX_TRIES // 2 - 1:
            continue
        groups.add(group)
        options = [range(len(values)) if length else [i] for (_, values), i, length in zip(axes, base, is_length)]
        choices = list(itertools.product(*options))
        rng.shuffle(choices)
        left = min(per_group, size - len(taken))
        for choice in choices:
            case_id, params = _case(axes, choice)
            if case_id not in taken and excluded(params) is None:
                taken.add(case_id)
                left -= 1
                yield Case(file, test, case_id, params, number)
            if left == 0:
                break
        number += 1
        if len(taken) == size:
            return


def population(axes: Sequence[Axis], excluded: Excluded) -> Counter[str]:
    """The number of all cases of a test for each reason for exclusion."""
    choices = itertools.product(*(range(len(values)) for _, values in axes))
    return Counter(excluded(_case(axes, choice)[1]) or "in the population" for choice in choices)


def population_table(counts: Counter[tuple[str, str]]) -> str:
    """Lines of (number, test, reason), after the totals of all reasons."""
    totals: Counter[str] = Counter()
    for (_, reason), number in counts.items():
        totals[reason] += number
    lines = [f"{counts.total()}\tcollected", *(f"{number}\t{reason}" for reason, number in totals.most_common()), ""]
    return "\n".join([*lines, *(f"{number}\t{test}\t{reason}" for (test, reason), number in sorted(counts.items()))])
