"""The calls that GPU tests compare with the fp64 oracle, dense and varlen, with and without features; their kernels.

`CALLS` have gradients, `FORWARD` have none. The lists are thinned by `covering`: any two of family, head dim, mask,
dtype, feature, class of lengths, memory order and so on meet in a call, so that few kernels are compiled. Random calls
(`drawn`) take their compiled-in properties from `KINDS`, so that many of them share few kernels.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cute_flash.planning.plan import CompileKey, plan_forward
from cute_flash.spec.arch import ARCHS, ArchSpec
from cute_flash.spec.band import Band
from cute_flash.spec.family import FAMILIES
from tests import cases, feature_gradients
from tests.cases import CAUSAL, FULL
from tests.combinations import Combination, Outputs, VarlenCombination
from tests.covering import covering
from tests.fakes.recording import backward_keys, forward_keys
from tests.feature_gradients import AnyCombination
from tests.lengths import Lengths

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = (BF16, FP16)
HEAD_DIMS = (64, 128, 256)  # of random calls, too
WINDOW = Band(100, 37)
SOFTCAP: dict[str, Any] = {"softcap": 2.0}
ALIBI: dict[str, Any] = {"alibi": 2}
SINKS: dict[str, Any] = {"sinks": True}
DROPOUT: dict[str, Any] = {"dropout": 0.3}
ALL = {**SOFTCAP, **ALIBI, **SINKS, **DROPOUT}
EACH = (SOFTCAP, ALIBI, SINKS, DROPOUT)


@dataclass(frozen=True)
class Call:
    case: AnyCombination
    family: str
    with_lse: bool = False  # the loss has a gradient of the LSE
    is_bshd: bool = False  # q, k and v of a dense call are (B, S, H, D) in memory
    deterministic: bool = False
    out_fp32: bool = False
    max_logit: bool = False

    @property
    def one(self) -> Combination:
        return self.case.one if isinstance(self.case, VarlenCombination) else self.case

    @property
    def is_varlen(self) -> bool:
        return isinstance(self.case, VarlenCombination)

    @property
    def id(self) -> str:
        one, sizes = self.one, f"b{self.one.batch}-{self.one.seqlen_q}x{self.one.seqlen_k}"
        if isinstance(self.case, VarlenCombination):
            queries = self.case.lengths.queries
            sizes = "-".join(map(str, queries)) if len(queries) < 7 else f"{len(queries)}seqs"
            sizes += "-used" * (self.case.lengths.used is not None)
        width = f"d{one.head_dim}" + f"v{one.head_dim_v}" * (one.head_dim_v != one.head_dim)
        dtype = {BF16: "bf16", FP16: "fp16"}[one.dtype]
        mask = "causal" if one.band == CAUSAL else "full" if one.band == FULL else f"{one.left}.{one.right}"
        flags = [name for name in FLAGS if getattr(self, name)]
        return "-".join((self.family, sizes, f"h{one.heads}.{one.heads_kv}", width, dtype, mask, *one.features, *flags))

    def tensors(self, device: str = "cuda") -> dict[str, Tensor]:
        made = {name: x.to(device) for name, x in self.case.tensors().items()}
        if self.is_bshd:
            made |= {name: made[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
        return made

    def weights(self) -> Outputs:
        """The gradients of out and of the LSE on the GPU."""
        return feature_gradients.weights(self.case, "cuda", self.with_lse)

    def attend(self, x: dict[str, Tensor]) -> Outputs:
        options: dict[str, Any] = {"deterministic": self.deterministic}
        if self.out_fp32:
            options["out_dtype"] = torch.float32
        out, lse = self.case.attend(x, **options)
        return out, lse if self.with_lse else lse.detach()

    def keys(self, arch: ArchSpec, has_gradients: bool = True) -> list[CompileKey]:
        """The kernels of the call and of its gradients."""
        x = self.tensors("cpu")
        args = self.case.args(x)._replace(
            kernel_family=self.family, deterministic=self.deterministic, out_fp32=self.out_fp32,
            return_max_logit=self.max_logit,
        )  # fmt: skip
        call = x["q"], x["k"], x["v"], args, arch
        return forward_keys(*call) + (backward_keys(*call, self.with_lse) if has_gradients else [])


FLAGS = ("with_lse", "is_bshd", "deterministic", "out_fp32", "max_logit")


def dense(
    batch: int, heads_kv: int, group: int, seqlen_q: int, seqlen_k: int, head_dim: int, dtype: torch.dtype = BF16,
    band: Band = FULL, features: dict[str, Any] | None = None, head_dim_v: int | None = None,
) -> Combination:  # fmt: skip
    return Combination(
        batch, heads_kv, group, seqlen_q, seqlen_k, head_dim, head_dim_v or head_dim, dtype, *band.bounds,
        features or {},
    )  # fmt: skip


def of_case(case: cases.Case, dtype: torch.dtype) -> Combination:
    group = case.heads // case.heads_kv
    sizes = case.batch, case.heads_kv, group, case.seqlen_q, case.seqlen_k, case.head_dim
    return dense(*sizes, dtype, case.band)


def varlen(lengths: Lengths, heads_kv: int, group: int, head_dim: int, *others: Any, **more: Any) -> VarlenCombination:
    return VarlenCombination(dense(1, heads_kv, group, 1, 1, head_dim, *others, **more), lengths)


def by_families(made: list[AnyCombination], **flags: bool) -> list[Call]:
    """Every call by every family; every third dense call with (B, S, H, D) memory."""
    calls = []
    for (i, case), family in itertools.product(enumerate(made), FAMILIES):
        is_bshd = i % 3 == 0 and not isinstance(case, VarlenCombination)
        calls.append(Call(case, family, with_lse=has_lse_gradient(case), is_bshd=is_bshd, **flags))
    return calls


def has_lse_gradient(case: AnyCombination) -> bool:
    """Every compiled-in property but the dtype meets both: a gradient of the LSE, and none."""
    return case.one.dtype == BF16 if isinstance(case, VarlenCombination) else case.dtype == FP16


def mask_of(case: Combination) -> str:
    return "l" * (case.left is not None) + "r" * (case.right is not None)


def properties(call: Call) -> tuple[Any, ...]:
    one = call.one
    tile = plan_forward(call.case.problem, ARCHS["sm_90"], call.family).tile
    lengths = (bisect((2, 64, 128, 129, 512, 2048), x) for x in (one.seqlen_q, one.seqlen_k))
    order = (one.seqlen_q > one.seqlen_k) - (one.seqlen_q < one.seqlen_k)
    is_causal = one.band == CAUSAL
    return (
        call.family, tile, one.head_dim, one.head_dim_v, one.dtype, mask_of(one), is_causal, order,
        *lengths, min(one.group, 3), tuple(one.features), *(getattr(call, name) for name in FLAGS),
    )  # fmt: skip


def few_properties(call: Call) -> tuple[Any, ...]:
    """For lists of calls with the same few sizes."""
    one, lengths = call.one, call.case.lengths if isinstance(call.case, VarlenCombination) else None
    sizes = (one.seqlen_q, one.seqlen_k) if lengths is None else tuple(lengths.queries)
    return (
        call.family, one.head_dim, one.head_dim_v, one.dtype, mask_of(one), tuple(one.features), sizes,
        *(getattr(call, name) for name in FLAGS if name != "is_bshd"),
    )  # fmt: skip


# ---- plain calls


def _plain() -> list[Call]:
    made: list[AnyCombination] = []
    for i, case in enumerate(cases.GPU):
        is_common = case.head_dim in HEAD_DIMS
        made.append(of_case(case, DTYPES[(i % 5 if is_common else case.head_dim // 8) % 2]))
    return covering(by_families(made), properties)


def _widths() -> list[Call]:
    """Dv ≠ D. The mma.sync backward has another tile for more than 512 keys; few queries pack heads."""
    made: list[AnyCombination] = [
        dense(2, 2, 4, rows, keys, d, BF16, band, head_dim_v=dv)
        for d, dv in (*cases.OTHER_WIDTHS, (104, 128), (128, 72))
        for band in cases.OTHER_WIDTH_BANDS
        for rows, keys in ((200, 333), (3, 333), (200, 700))
    ]
    return covering(by_families(made), few_properties)


def _deterministic() -> list[Call]:
    """Few K/V tiles, and more tiles than an H200 has SMs; blocks of queries without keys."""
    made: list[AnyCombination] = [of_case(case, BF16) for case in cases.DETERMINISTIC]
    made += [dense(2, 2, 4, 200, 333, d, BF16, CAUSAL, head_dim_v=dv) for d, dv in ((128, 64), (192, 128))]
    made += [dense(2, 16, 2, 700, 1200, 128, BF16, FULL, features) for features in (ALIBI, ALL)]
    made += [dense(4, 10, 4, 300, 900, 64, BF16, WINDOW, ALL)]
    made += [dense(2, 1, 3, 197, 333, d, BF16, CAUSAL, features) for d, features in ((256, DROPOUT), (192, ALL))]
    # The sequences include one without queries and one without keys.
    some = Lengths([1000, 3, 0, 200, 700, 333], [1000, 3, 50, 0, 900, 333])
    made += [varlen(some, 2, 4, d, BF16, band) for d, band in ((64, FULL), (128, CAUSAL), (256, Band(200, 100)))]
    made += [varlen(BUSY, 4, 3, 64, BF16, WINDOW, ALL), varlen(BUSY, 4, 3, 128, BF16, CAUSAL, ALL)]
    return covering(by_families(made, deterministic=True), few_properties)


def _fp32_outputs() -> list[Call]:
    made: list[AnyCombination] = [
        dense(2, 2, 2, 257, 391, d, BF16, band)
        for d, band in ((64, FULL), (72, CAUSAL), (128, CAUSAL), (128, WINDOW), (256, FULL), (256, WINDOW))
    ]
    made += [dense(4, 8, 5, 300, 150, 64, BF16, CAUSAL), dense(2, 2, 8, 3, 700, 128, BF16, CAUSAL)]
    made += [dense(1, 2, 1, 999, 3, 64, BF16, CAUSAL), dense(2, 8, 1, 200, 333, 192, BF16, CAUSAL, head_dim_v=128)]
    made += [varlen(RAGGED, 2, 2, 64, BF16, CAUSAL), varlen(USED, 2, 3, 128)]
    return covering(by_families(made, out_fp32=True), few_properties)


# ---- varlen batches

RAGGED = Lengths([257, 1, 0, 130, 64, 500], [391, 3, 77, 0, 64, 129], None, (70, 33))
USED = Lengths([200, 50, 0, 129, 40], [300, 64, 50, 129, 40], [250, 0, 20, 128, 40], (3, 200))
BUSY = Lengths([300, 40, 999, 128] * 3, [300, 40, 999, 128] * 3)  # more tiles than SMs


def _varlen() -> list[Call]:
    long = Lengths([1500, 20, 300, 1, 0, 700], [1500, 20, 300, 1, 0, 700])
    # More sequences than the scheduler kernel has threads.
    tiny = Lengths([(7 * b) % 5 for b in range(1500)], [(5 * b) % 7 for b in range(1500)])
    made: list[AnyCombination] = [
        varlen(RAGGED, 2, 2, d, dtype, band)
        for (d, dtype), band in itertools.product(((64, FP16), (128, BF16)), (FULL, CAUSAL, WINDOW))
    ]
    made += [varlen(RAGGED, 2, 2, d, BF16, band) for d, band in ((72, CAUSAL), (96, WINDOW), (256, WINDOW))]
    made += [varlen(RAGGED, 2, 2, d, BF16, CAUSAL, head_dim_v=dv) for d, dv in ((192, 128), (64, 256), (128, 64))]
    made += [varlen(long, 4, 1, d, BF16, band) for d, band in ((64, CAUSAL), (128, FULL))]
    made += [varlen(USED, 2, 3, d, BF16, band) for d, band in ((64, FULL), (128, CAUSAL), (256, FULL))]
    bands = (CAUSAL, Band(64, None), Band(None, 20))
    made += [varlen(Lengths.drawn(5), 1, 8, 128, BF16, band) for band in bands]
    made += [varlen(tiny, 1, 2, 64, BF16, CAUSAL), *(varlen(BUSY, 2, 4, d, BF16, CAUSAL) for d in (64, 128, 256))]
    # The mma.sync backward has another tile for more than 512 keys on average.
    made += [varlen(Lengths([300, 50, 420], [700, 10, 1000]), 2, 2, 128, BF16, band) for band in (FULL, WINDOW)]
    # With features; slopes that all sequences share, head dims narrower than their tile.
    made += [varlen(RAGGED, 2, 2, 128, BF16, CAUSAL, features) for features in (ALIBI, {**SOFTCAP, **ALIBI}, ALL)]
    made += [varlen(USED, 3, 1, 64, BF16, FULL, ALIBI), varlen(USED, 1, 3, 64, FP16, WINDOW, {**SOFTCAP, **DROPOUT})]
    made += [varlen(USED, 1, 5, 128, BF16, FULL, ALL), varlen(RAGGED, 1, 3, 256, BF16, WINDOW, SINKS)]
    made += [varlen(USED, 2, 2, 256, FP16, CAUSAL, features) for features in (SOFTCAP, DROPOUT)]
    made += [varlen(RAGGED, 1, 2, d, BF16, CAUSAL, {**ALL, "alibi": 1}) for d in (40, 192)]
    return covering(by_families(made), few_properties)


# ---- features


def _features() -> list[Call]:
    made: list[AnyCombination] = [dense(2, 2, 2, 257, 391, 128, BF16, CAUSAL, features) for features in (*EACH, ALL)]
    made += [dense(1, 4, 1, 300, 200, 64, FP16, FULL, features) for features in (*EACH, ALL)]
    made += [dense(2, 2, 4, 130, 333, 256, BF16, WINDOW, features) for features in (SOFTCAP, SINKS, ALL)]
    # Rows without keys, with and without a sink; head dims narrower than their tile.
    made += [dense(2, 3, 2, 333, 129, 72, FP16, CAUSAL, features) for features in (ALIBI, ALL)]
    made += [dense(2, 1, 2, 150, 260, d, BF16, CAUSAL, ALL) for d in (40, 96, 192)]
    made += [dense(1, 2, 1, 999, 3, 64, BF16, CAUSAL, ALL), dense(1, 2, 1, 1, 1, 128, BF16, CAUSAL, ALL)]
    # Many more tiles than SMs, of several query heads: persistent CTAs compute tiles of several heads.
    made += [dense(4, 10, 4, 300, 900, 64, BF16, WINDOW, ALL), dense(4, 10, 4, 300, 900, 128, BF16, CAUSAL, ALL)]
    made += [dense(2, 16, 2, 700, 1200, 128, BF16, FULL, ALIBI)]
    widths = ((128, 64, SOFTCAP), (128, 64, ALL), (192, 128, ALIBI), (192, 128, DROPOUT))
    made += [dense(2, 2, 2, 150, 260, d, BF16, CAUSAL, features, dv) for d, dv, features in widths]
    # Wide heads, causal and full, with a group of heads and odd lengths.
    made += [dense(2, 1, 3, 197, 333, 256, BF16, CAUSAL, features) for features in (ALIBI, DROPOUT, ALL)]
    made += [dense(1, 2, 2, 333, 197, 192, FP16, FULL, features) for features in (SOFTCAP, SINKS, ALL)]
    return covering(by_families(made), few_properties)


def _forward() -> list[Call]:
    """Calls without gradients: the forward has more tiles for single features than the backward."""
    most: dict[str, Any] = {"return_max_logit": True}
    # ALiBi on both sides of the diagonal in several blocks of keys: the terms come from tensor cores. Several stages of
    # dropout masks. Tiles for calls with a single feature, and of three warpgroups at head dim 96 for many keys.
    made: list[AnyCombination] = [
        dense(2, 2, 2, 700, 2300 if d == 96 else 1100, d, FP16 if d in (96, 192) else BF16, band, features)
        for d in (64, 80, 96, 128, 192, 256)
        for features in (*EACH, most)
        for band in (FULL, CAUSAL, Band(500, 80))
    ]
    # More tiles than SMs, some without keys.
    made += [dense(4, 8, 5, 300, 150, d, FP16, CAUSAL, f) for d in (64, 96, 128, 256) for f in (*EACH, ALL | most)]
    # Few queries with GQA, with and without pack_gqa; very few visible keys, and a single score.
    made += [dense(2, 2, 8, rows, 700, 128, BF16, CAUSAL, SOFTCAP) for rows in (1, 33)]
    made += [dense(2, 2, 8, 3, 700, 128, BF16, CAUSAL, ALL | most), dense(1, 2, 1, 999, 3, 64, BF16, CAUSAL, SINKS)]
    # As in models.
    made += [dense(1, 2, 2, 900, 2500, 256, BF16, FULL, {"softcap": 50.0})]
    calls = [
        Call(
            replace(case, features={name: x for name, x in case.features.items() if name not in most}),
            family,
            max_logit="return_max_logit" in case.features,
        )
        for case, family in itertools.product(made, FAMILIES)
    ]
    return covering(calls, few_properties)


PLAIN, WIDTHS, VARLEN, FEATURES = _plain(), _widths(), _varlen(), _features()
FORWARD = _forward()
CALLS = [*PLAIN, *WIDTHS, *VARLEN, *FEATURES, *_deterministic(), *_fp32_outputs()]


# ---- random calls

LENGTHS = (1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 200, 257, 300)
VARLEN_LENGTHS = (0, 0, 1, 17, 63, 64, 65, 100, 129, 200, 257)


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
    def of(call: Call) -> Kind:
        one = call.one
        return Kind(one.head_dim, one.head_dim_v, one.dtype, mask_of(one), tuple(one.features), call.deterministic)


COMMON_KINDS = (
    Kind(64, 64, BF16, "r", ()),
    Kind(64, 64, FP16, "r", ()),
    Kind(64, 64, BF16, "l", ("dropout",)),
    Kind(128, 128, FP16, "r", tuple(ALL)),
    Kind(128, 128, FP16, "lr", ("alibi", "dropout")),
    Kind(128, 128, BF16, "l", ()),
    Kind(256, 256, FP16, "", ("dropout",)),
)
COMMON_VARLEN_KINDS = (
    Kind(64, 64, BF16, "r", ()),
    Kind(128, 128, FP16, "r", ("softcap",)),
    Kind(128, 128, BF16, "l", ("softcap", "sinks")),
)


@cache
def kinds(family: str, is_varlen: bool) -> list[Kind]:
    """Those of the listed calls of a family with features, and a few others."""
    wanted = [call for call in CALLS if call.family == family and call.is_varlen == is_varlen and call.one.features]
    found = [Kind.of(call) for call in wanted if call.one.head_dim in (*HEAD_DIMS, 192)]
    return list(dict.fromkeys((*found, *(COMMON_VARLEN_KINDS if is_varlen else COMMON_KINDS))))


def kind_of(seed: int, family: str) -> Kind:
    """The kind of a seed; every third is a varlen batch."""
    third, rest = divmod(seed, 3)
    known = kinds(family, rest == 2)
    return known[(third if rest == 2 else 2 * third + rest) % len(known)]


def drawn(seed: int, family: str) -> Call:
    """The random call of a seed."""
    pick, kind = random.Random(seed), kind_of(seed, family)
    case: AnyCombination = _one(pick, kind)
    if seed % 3 == 2:
        case = VarlenCombination(case, _lengths(pick))
    return Call(case, family, with_lse=has_lse_gradient(case), deterministic=kind.deterministic)


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
