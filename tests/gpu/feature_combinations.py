"""Calls with features, forward and backward, for tests on a GPU and for compiling ahead.

What is compiled in comes from a list, so that many random calls share few kernels; all else is drawn.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from cute_flash.arch import ArchSpec
from cute_flash.plan import CompileKey, bwd_plan, plan, use_kernels
from cute_flash.problem import PLAIN, UnsupportedError
from tests.combinations import Combination

BF16, FP16 = torch.bfloat16, torch.float16
SOFTCAP: dict[str, Any] = {"softcap": 2.0}
ALIBI: dict[str, Any] = {"alibi": 2}
SINKS: dict[str, Any] = {"sinks": True}
DROPOUT: dict[str, Any] = {"dropout": 0.3}
ALL = {**SOFTCAP, **ALIBI, **SINKS, **DROPOUT}
HEAD_DIMS = (64, 128, 256)
LENGTHS = (1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 200, 257, 300)


def _cases() -> list[Combination]:
    causal, window = (None, 0), (100, 37)

    def case(b, kv, group, sq, sk, d, dtype, band, features) -> Combination:  # type: ignore[no-untyped-def]
        return Combination(b, kv, group, sq, sk, d, d, dtype, *band, features)

    each = (SOFTCAP, ALIBI, SINKS, DROPOUT, {**SOFTCAP, **ALIBI}, ALL)
    made = [case(2, 2, 2, 257, 391, 128, BF16, causal, features) for features in each]
    made += [case(1, 4, 1, 300, 200, 64, FP16, (None, None), features) for features in each]
    made += [case(2, 2, 4, 130, 333, 256, BF16, window, features) for features in (SOFTCAP, SINKS, ALL)]
    # Rows without keys, with and without a sink; head dims that tiles are wider than.
    made += [case(2, 3, 2, 333, 129, 72, FP16, causal, features) for features in (ALIBI, ALL)]
    made += [case(2, 1, 2, 150, 260, d, BF16, causal, ALL) for d in (40, 96, 192)]
    made += [case(1, 2, 1, 999, 3, 64, BF16, causal, ALL), case(1, 2, 1, 1, 1, 128, FP16, (None, None), ALL)]
    # Many more tiles than SMs, of several query heads: persistent blocks work on some of each.
    made += [
        case(4, 10, 4, 300, 900, 64, BF16, window, ALL),
        case(4, 10, 4, 300, 900, 128, BF16, causal, ALL),
    ]
    made += [case(2, 16, 2, 700, 1200, 128, BF16, (None, None), features) for features in (ALIBI, ALL)]
    # Values of another width.
    for widths, features in itertools.product(((128, 64), (192, 128)), (SOFTCAP, ALL)):
        made += [replace(case(2, 2, 2, 150, 260, widths[0], BF16, causal, features), head_dim_v=widths[1])]
    return made


CASES = _cases()
# Also compared bit by bit, where there is an order.
ORDERED = [
    case for case in CASES if len(case.features) in (1, 4) and 300 <= case.seqlen_q and case.head_dim < 256
][-5:]


def mask_of(case: Combination) -> str:
    return "l" * (case.left is not None) + "r" * (case.right is not None)


# (head dim, dtype, mask, features) of random calls: those of the cases, and some more.
KINDS = list(
    dict.fromkeys(
        (x.head_dim, x.dtype, mask_of(x), tuple(x.features))
        for x in CASES
        if x.head_dim in HEAD_DIMS and x.head_dim == x.head_dim_v
    )
)
KINDS += [
    (64, BF16, "l", ("dropout",)),
    (64, BF16, "r", ()),
    (128, FP16, "lr", ("alibi", "dropout")),
    (128, BF16, "l", ()),
    (256, BF16, "r", ("alibi",)),
    (256, FP16, "", ("dropout",)),
]


def drawn(seed: int) -> Combination:
    """One of all that belong together; the same for the same seed."""
    pick = random.Random(seed)
    head_dim, dtype, mask, names = KINDS[seed % len(KINDS)]
    values = {
        "softcap": pick.choice([0.5, 3.0, 30.0]),
        "alibi": pick.choice([1, 2]),
        "sinks": True,
        "dropout": pick.choice([0.1, 0.3, 0.5]),
    }

    def bound() -> int:
        return pick.choice([0, 1, pick.randrange(20), pick.randrange(300), 10_000])

    return Combination(
        batch=pick.choice([1, 2, 3]),
        heads_kv=pick.choice([1, 2, 3]),
        group=pick.choice([1, 1, 2, 4]),
        seqlen_q=pick.choice(LENGTHS),
        seqlen_k=pick.choice(LENGTHS),
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        left=bound() if "l" in mask else None,
        right=bound() if "r" in mask else None,
        features={name: values[name] for name in names},
    )


def has_gradients(case: Combination, family: str) -> bool:
    """Whether a family computes them: wgmma has no registers for features beside wide heads."""
    is_plain = case.problem.features.in_gradients == PLAIN
    return family == "sm80" or is_plain or max(case.head_dim, case.head_dim_v) <= 128


def keys(arch: ArchSpec, runnable: list[str], count: int) -> Iterator[CompileKey]:
    """Of all kernels that the tests of gradients with features need."""
    for case, family in itertools.product((*CASES, *map(drawn, range(count))), runnable):
        problem = case.problem
        if problem.is_empty:
            continue
        with use_kernels(family):
            # Asked for beside the gradients.
            yield plan(problem, arch, is_packable=True).key
            for deterministic in (False, True):
                if deterministic and case not in ORDERED:
                    continue
                try:
                    gradients = bwd_plan(problem, arch, deterministic)
                except UnsupportedError:
                    continue
                yield from (gradients.before(True), gradients.main, gradients.after)
                if case in CASES:
                    yield gradients.before(False)


def with_other_values(case: Combination) -> Combination:
    """The same kernels, other numbers."""
    values = {"softcap": 20.0, "dropout": 0.9, "alibi": 1}
    return replace(case, features={name: values.get(name, x) for name, x in case.features.items()})
