"""Calls with features, forward and backward, for GPU tests and for compilation ahead of them.

Compiled-in properties come from a list, so that many random calls share few kernels. All others are random.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_flash.planning.plan import CompileKey
from cute_flash.spec.arch import ArchSpec
from tests.combinations import Combination, VarlenCombination
from tests.fakes.recording import backward_keys, forward_keys
from tests.feature_gradients import AnyCombination
from tests.lengths import Lengths

BF16, FP16 = torch.bfloat16, torch.float16
SOFTCAP: dict[str, Any] = {"softcap": 2.0}
ALIBI: dict[str, Any] = {"alibi": 2}
SINKS: dict[str, Any] = {"sinks": True}
DROPOUT: dict[str, Any] = {"dropout": 0.3}
ALL = {**SOFTCAP, **ALIBI, **SINKS, **DROPOUT}
HEAD_DIMS = (64, 128, 256)
LENGTHS = (1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 200, 257, 300)
VARLEN_LENGTHS = (0, 0, 1, 17, 63, 64, 65, 100, 129, 200, 257)


def _cases() -> list[Combination]:
    causal, window = (None, 0), (100, 37)

    def case(b, kv, group, sq, sk, d, dtype, band, features) -> Combination:  # type: ignore[no-untyped-def]
        return Combination(b, kv, group, sq, sk, d, d, dtype, *band, features)

    each = (SOFTCAP, ALIBI, SINKS, DROPOUT, {**SOFTCAP, **ALIBI}, ALL)
    made = [case(2, 2, 2, 257, 391, 128, BF16, causal, features) for features in each]
    made += [case(1, 4, 1, 300, 200, 64, FP16, (None, None), features) for features in each]
    made += [case(2, 2, 4, 130, 333, 256, BF16, window, features) for features in (SOFTCAP, SINKS, ALL)]
    # Rows without keys, with and without a sink; head dims narrower than their tile.
    made += [case(2, 3, 2, 333, 129, 72, FP16, causal, features) for features in (ALIBI, ALL)]
    made += [case(2, 1, 2, 150, 260, d, BF16, causal, ALL) for d in (40, 96, 192)]
    made += [case(1, 2, 1, 999, 3, 64, BF16, causal, ALL), case(1, 2, 1, 1, 1, 128, FP16, (None, None), ALL)]
    # Many more tiles than SMs, of several query heads: persistent CTAs compute tiles of several heads.
    made += [case(4, 10, 4, 300, 900, 64, BF16, window, ALL), case(4, 10, 4, 300, 900, 128, BF16, causal, ALL)]
    made += [case(2, 16, 2, 700, 1200, 128, BF16, (None, None), features) for features in (ALIBI, ALL)]
    # Dv ≠ D.
    for widths, features in itertools.product(((128, 64), (192, 128)), (SOFTCAP, ALIBI, DROPOUT, ALL)):
        made += [replace(case(2, 2, 2, 150, 260, widths[0], BF16, causal, features), head_dim_v=widths[1])]
    # Wide heads: each feature, causal and full, in both dtypes, with a group of heads and odd lengths.
    made += [case(2, 1, 3, 197, 333, 256, BF16, causal, features) for features in each]
    made += [case(1, 2, 2, 333, 197, 192, FP16, (None, None), features) for features in each]
    return made


CASES = _cases()
# The call of `test_features_bwd.test_captured_training_step`.
CAPTURED = Combination(1, 2, 1, 200, 300, 64, 64, BF16, None, None, {"softcap": 5.0, "alibi": 1, "dropout": 0.5})
# Calls whose gradients are also compared bit by bit.
DETERMINISTIC = [
    case for case in CASES if len(case.features) in (1, 4) and 300 <= case.seqlen_q and case.head_dim <= 128
][-5:]
DETERMINISTIC += [case for case in CASES if case.head_dim > 128 and "dropout" in case.features][::3]


def _varlen_cases() -> list[VarlenCombination]:
    ragged = Lengths([257, 1, 0, 130, 64, 300], [391, 3, 77, 0, 64, 129], None, (70, 33))
    used = Lengths([200, 50, 0, 129, 40], [300, 64, 50, 129, 40], [250, 0, 20, 128, 40], (3, 200))
    busy = Lengths([300, 40, 999, 128] * 3, [300, 40, 999, 128] * 3)
    causal, window, full = (None, 0), (100, 37), (None, None)

    def case(lengths, kv, group, d, dtype, band, features) -> VarlenCombination:  # type: ignore[no-untyped-def]
        return VarlenCombination(Combination(1, kv, group, 1, 1, d, d, dtype, *band, features), lengths)

    some = (ALIBI, SINKS, {**SOFTCAP, **ALIBI}, ALL)
    made = [case(ragged, 2, 2, 128, BF16, causal, features) for features in some]
    made += [case(used, 3, 1, 64, BF16, full, ALIBI), case(used, 1, 3, 64, FP16, window, {**SOFTCAP, **DROPOUT})]
    made += [case(used, 1, 5, 128, BF16, full, ALL)]
    made += [case(ragged, 1, 3, 256, BF16, window, features) for features in (SINKS, ALL)]
    made += [case(used, 2, 2, 256, FP16, causal, features) for features in (SOFTCAP, ALIBI, DROPOUT)]
    # Slopes that all sequences share; head dims narrower than their tile.
    made += [case(ragged, 1, 2, d, BF16, causal, {**ALL, "alibi": 1}) for d in (40, 72, 192)]
    # More tiles than SMs, of several query heads.
    made += [case(busy, 4, 3, 64, BF16, window, ALL), case(busy, 4, 3, 128, BF16, causal, ALL)]
    return made


# Varlen batches. The gradients of the last two are also compared bit by bit.
VARLEN_CASES = _varlen_cases()


def mask_of(case: Combination) -> str:
    return "l" * (case.left is not None) + "r" * (case.right is not None)


@dataclass(frozen=True)
class Kind:
    """The compiled-in properties of a random call."""

    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    mask: str
    names: tuple[str, ...]
    deterministic: bool = False

    @staticmethod
    def of(case: Combination, deterministic: bool = False) -> Kind:
        widths = case.head_dim, case.head_dim_v
        return Kind(*widths, case.dtype, mask_of(case), tuple(case.features), deterministic)


# The kinds of the cases, and some more.
KINDS = list(dict.fromkeys(Kind.of(case) for case in CASES if case.head_dim in (*HEAD_DIMS, 192)))
KINDS += list(dict.fromkeys(Kind.of(case, True) for case in DETERMINISTIC))
KINDS += [
    Kind(64, 64, BF16, "l", ("dropout",)),
    Kind(64, 64, BF16, "r", ()),
    Kind(64, 64, FP16, "r", ()),
    Kind(128, 128, FP16, "r", tuple(ALL)),
    Kind(128, 128, FP16, "lr", ("alibi", "dropout")),
    Kind(128, 128, BF16, "l", ()),
    Kind(256, 256, BF16, "r", ("alibi",)),
    Kind(256, 256, FP16, "", ("dropout",)),
]
# Kinds of varlen batches.
VARLEN_KINDS = [
    *dict.fromkeys(Kind.of(case.one) for case in VARLEN_CASES if case.head_dim in HEAD_DIMS),
    Kind(64, 64, BF16, "r", ()),
    Kind(128, 128, FP16, "r", ("softcap",)),
    Kind(128, 128, BF16, "l", ("softcap", "sinks")),
]


def kind_of(seed: int) -> Kind:
    """The kind of a seed; every third is a varlen batch."""
    third, rest = divmod(seed, 3)
    return VARLEN_KINDS[third % len(VARLEN_KINDS)] if rest == 2 else KINDS[(2 * third + rest) % len(KINDS)]


def drawn(seed: int) -> AnyCombination:
    """The random call of a seed."""
    pick = random.Random(seed)
    one = _one(pick, kind_of(seed))
    return VarlenCombination(one, _lengths(pick)) if seed % 3 == 2 else one


def _lengths(pick: random.Random) -> Lengths:
    """Lengths of a few sequences. Some have no queries or no keys, but not all."""
    batch = pick.choice([1, 2, 3, 5])
    queries, keys = ([pick.choice(VARLEN_LENGTHS) for _ in range(batch)] for _ in range(2))
    keys[pick.randrange(batch)], queries[pick.randrange(batch)] = pick.choice(LENGTHS), pick.choice(LENGTHS)
    used = [pick.randrange(k + 1) for k in keys] if pick.random() < 0.4 else None
    return Lengths(queries, keys, used, (pick.choice([0, 0, 5, 130]), pick.choice([0, 0, 9, 130])))


def _one(pick: random.Random, kind: Kind) -> Combination:
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
        group=pick.choice([1, 2, 3, 4]),
        seqlen_q=pick.choice(LENGTHS),
        seqlen_k=pick.choice(LENGTHS),
        head_dim=kind.head_dim,
        head_dim_v=kind.head_dim_v,
        dtype=kind.dtype,
        left=bound() if "l" in kind.mask else None,
        right=bound() if "r" in kind.mask else None,
        features={name: values[name] for name in kind.names},
    )


def keys(arch: ArchSpec, runnable: list[str], count: int) -> Iterator[CompileKey]:
    """The kernels of the gradient tests with features: the listed dense calls, and random calls, dense and varlen."""
    for case, family in itertools.product((*CASES, CAPTURED, *map(drawn, range(count))), runnable):
        yield from case_keys(case, arch, family)


def varlen_cases_keys(arch: ArchSpec, runnable: list[str]) -> Iterator[CompileKey]:
    for case, family in itertools.product(VARLEN_CASES, runnable):
        yield from case_keys(case, arch, family)


def case_keys(case: AnyCombination, arch: ArchSpec, family: str) -> Iterator[CompileKey]:
    x = case.tensors()
    q, k, v, args = x["q"], x["k"], x["v"], case.args(x)._replace(kernel_family=family)
    yield from forward_keys(q, k, v, args, arch)
    is_listed = case in CASES or case is CAPTURED or case in VARLEN_CASES
    is_deterministic = case in DETERMINISTIC or case in VARLEN_CASES[-2:]
    for deterministic in (False, True) if is_deterministic else (False,):
        for has_dlse in (True, False) if is_listed else (True,):
            yield from backward_keys(q, k, v, args._replace(deterministic=deterministic), arch, has_dlse)


def with_other_values(case: Combination) -> Combination:
    """The same call with other run-time values of its features."""
    values = {"softcap": 20.0, "dropout": 0.9, "alibi": 1}
    return replace(case, features={name: values.get(name, x) for name, x in case.features.items()})
