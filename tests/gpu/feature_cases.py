"""Forward calls with features, for GPU tests and for compilation ahead of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from cute_flash.spec.features import FEATURES
from cute_flash.spec.problem import Problem
from tests.cases import CAUSAL, FULL, Case, make_inputs
from tests.combinations import RNG

SOFTCAP, ALIBI, SINKS, DROPOUT, MAX_LOGIT = "softcap", "alibi", "sinks", "dropout", "return_max_logit"
EACH = ((SOFTCAP,), (ALIBI,), (SINKS,), (DROPOUT,), (MAX_LOGIT,))
ALL = (SOFTCAP, ALIBI, SINKS, DROPOUT, MAX_LOGIT)


@dataclass(frozen=True)
class FeatureCase:
    case: Case
    dtype: torch.dtype
    names: tuple[str, ...]
    softcap: float = 5.0
    dropout: float = 0.3

    @property
    def id(self) -> str:
        return f"{self.case.id}-{str(self.dtype).removeprefix('torch.')}-{'+'.join(self.names)}"

    def problem(self) -> Problem:
        features = tuple(feature.name for feature in FEATURES if feature.name in self.names)
        return replace(self.case.problem(self.dtype), features=features)

    def tensors(self, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """q, k, v, and the keywords of `attn`."""
        case = self.case
        generator = torch.Generator().manual_seed(5)
        # Slopes of both signs, by batch and head; sinks with about the weight of all keys.
        slopes = torch.randn(case.batch, case.heads, generator=generator) * 0.05
        sinks = torch.randn(case.heads, generator=generator) + 5.0
        values = {SOFTCAP: self.softcap, ALIBI: slopes, SINKS: sinks, DROPOUT: self.dropout, MAX_LOGIT: True}
        options = {name: values[name] for name in self.names}
        for name in (ALIBI, SINKS):
            if name in options:
                options[name] = options[name].to(device)
        return *make_inputs(case, self.dtype, device), {"window": (case.band.left, case.band.right), **options}

    def args(self, q: Tensor, options: dict[str, Any]) -> AttentionArgs:
        """The call for functions of `cute_flash.reference`; dropout has the seed `RNG`."""
        return reference.plain_args(q, self.case.band)._replace(
            softcap=options.get(SOFTCAP, 0.0),
            alibi=options.get(ALIBI),
            sinks=options.get(SINKS),
            dropout=options.get(DROPOUT, 0.0),
            rng=torch.tensor(RNG, device=q.device) if DROPOUT in options else None,
            return_max_logit=MAX_LOGIT in options,
        )


def max_logit(q: Tensor, k: Tensor, args: AttentionArgs) -> Tensor:
    """(H) in fp64, by the CPU path, on the CPU."""
    on_cpu = [x if x is None else x.cpu() for x in (args.alibi, args.sinks)]
    args = args._replace(alibi=on_cpu[0], sinks=on_cpu[1], dropout=0.0, rng=None, return_max_logit=True)
    q, k = q.double().cpu(), k.double().cpu()
    most = reference.forward(q, k, k, args)[2]
    assert most is not None
    return most


def _cases() -> list[FeatureCase]:
    bf16, fp16 = torch.bfloat16, torch.float16
    window, two = Band(100, 37), (SOFTCAP, SINKS)
    # One by one and together, at the head dims that matter most.
    cases = [FeatureCase(Case(2, 4, 2, 257, 391, 128, CAUSAL), bf16, names) for names in (*EACH, ALL)]
    cases += [FeatureCase(Case(1, 4, 4, 300, 200, 64, FULL), fp16, names) for names in (*EACH, ALL)]
    # Wide heads, and rows without keys above a causal mask with more queries than keys.
    cases += [FeatureCase(Case(2, 8, 2, 130, 700, 256, window), bf16, names) for names in ((SOFTCAP,), ALL)]
    cases += [FeatureCase(Case(2, 6, 3, 333, 129, 72, CAUSAL), fp16, names) for names in (two, ALL)]
    # Less common head dims.
    cases += [FeatureCase(Case(2, 2, 1, 150, 260, d, CAUSAL), bf16, ALL) for d in (40, 96, 192)]
    # As in models: sinks in a window, ALiBi without a mask, a softcap for wide heads.
    cases += [FeatureCase(Case(1, 8, 1, 1000, 1000, 64, Band(200, 0)), bf16, (SINKS,))]
    cases += [FeatureCase(Case(1, 4, 4, 2500, 2500, 128, FULL), bf16, names) for names in ((ALIBI,), (DROPOUT,))]
    cases += [FeatureCase(Case(1, 4, 2, 900, 2500, 256, FULL), bf16, (SOFTCAP,), softcap=50.0)]
    # ALiBi on both sides of the diagonal, in several blocks of keys: the terms come from tensor cores.
    wide = (64, 96, 128, 192, 256)
    for d, band in itertools.product(wide, (FULL, CAUSAL, Band(500, 80))):
        cases += [FeatureCase(Case(2, 4, 2, 700, 1100, d, band), fp16 if d == 96 else bf16, (ALIBI,))]
    cases += [FeatureCase(Case(4, 40, 8, 300, 450, d, CAUSAL), bf16, (ALIBI,)) for d in (64, 128, 192)]
    # Several stages of dropout masks.
    cases += [FeatureCase(Case(2, 4, 2, 700, 1100, d, CAUSAL), bf16, (DROPOUT,)) for d in wide]
    # Tiles for calls with a single feature: softcap and dropout at widths with a tile of their own.
    for d, names, band in itertools.product((80, 192, 256), ((SOFTCAP,), (DROPOUT,)), (FULL, CAUSAL, Band(500, 80))):
        cases += [FeatureCase(Case(2, 4, 2, 700, 1100, d, band), bf16, names)]
    for d, names in itertools.product((64, 96, 192, 256), ((SOFTCAP,), (DROPOUT,))):
        cases += [FeatureCase(Case(4, 40, 8, 300, 450, d, CAUSAL), fp16, names, softcap=50.0)]
    # Three warpgroups at head dim 96, for many keys.
    for names, band in itertools.product(((SINKS,), (MAX_LOGIT,)), (FULL, CAUSAL, Band(1000, 30))):
        cases += [FeatureCase(Case(2, 4, 2, 700, 2300, 96, band), bf16, names)]
    # Few queries with GQA, with and without pack_gqa.
    cases += [FeatureCase(Case(2, 16, 2, rows, 700, 128, CAUSAL), bf16, (SOFTCAP,)) for rows in (1, 33)]
    cases += [FeatureCase(Case(2, 16, 2, 3, 700, 128, CAUSAL), bf16, ALL)]
    # Many more tiles than SMs: persistent CTAs compute tiles of several heads, some without keys.
    for d, band in ((64, Band(30, 20)), (128, CAUSAL), (128, FULL), (256, CAUSAL)):
        cases += [FeatureCase(Case(4, 40, 8, 300, 150, d, band), bf16, ALL)]
    # Very few visible keys, and a single score.
    cases += [
        FeatureCase(Case(1, 2, 2, 999, 3, 64, CAUSAL), bf16, two),
        FeatureCase(Case(1, 2, 2, 1, 1, 128), fp16, ALL),
    ]
    return cases


CASES = _cases()
