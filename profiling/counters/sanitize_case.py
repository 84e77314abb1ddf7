"""`python -m profiling.counters.sanitize_case`: small launches of every kind of kernel, under compute-sanitizer.

Each launch is one call of `attn` or `attn_varlen` and its gradients, or a call of `attn_decode`. Inputs are made on the
CPU, so that few kernels of torch are checked. A line is printed before and after each launch, to assign the sanitizer's
reports to launches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import cute_flash
from cute_flash.distributed.accumulate import Output, PartialOutput
from cute_flash.errors import UnsupportedError
from cute_flash.planning.launch import LaunchKey
from cute_flash.planning.tiles import MAX_NARROW_HEAD_DIM
from cute_flash.score_mod.block_mask import BlockMask
from profiling.measure.launches import needed_kernels as kernels_of_calls

FAMILIES = ("sm80", "sm90")
HEAD_DIMS = (64, 128, 256)
DENSE, VARLEN, DECODE = "dense", "varlen", "decode"
BEGIN, END, SKIPPED = "LAUNCH", "DONE", "FORWARD ONLY"


def _normal(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()


# ---- calls of `attn` and `attn_varlen`


class Sizes(NamedTuple):
    """More keys than the stages of a pipeline hold, so that stages are written again after they were read."""

    heads: int = 2
    heads_kv: int = 1
    rows: int = 150
    keys: int = 600


SIZES = Sizes()


@dataclass(frozen=True)
class Feature:
    """The keywords of a call, those whose values are tensors, and its sizes. `has_varlen`: `attn_varlen` takes it."""

    keywords: dict[str, Any] = field(default_factory=dict)
    tensors: Callable[[Sizes, str], dict[str, Any]] = lambda sizes, device: {}
    sizes: Sizes = SIZES
    has_varlen: bool = True
    has_narrow_values: bool = False  # values have half the head dim of the keys
    dtype: torch.dtype = torch.bfloat16


def _per_head(*names: str) -> Callable[[Sizes, str], dict[str, Any]]:
    return lambda sizes, device: {name: _normal(sizes.heads, device=device, dtype=torch.float32) for name in names}


def _bias(sizes: Sizes, device: str, is_shared: bool = False, is_constant: bool = False) -> dict[str, Any]:
    bias = _normal(1, 1 if is_shared else sizes.heads, sizes.rows, sizes.keys, device=device)
    return {"bias": bias.requires_grad_(not is_constant)}


def _block_mask(sizes: Sizes, device: str) -> dict[str, Any]:
    shape = (1, sizes.heads, sizes.rows, sizes.keys)
    return {"block_mask": BlockMask.of(lambda b, h, i, j: (i - j).abs() < 60, shape, device=device)}


# Tiles for many keys.
LONG_SIZES = Sizes(rows=250, keys=2400)
FEATURES = {
    "full": Feature(),
    "causal": Feature({"causal": True}),
    "window": Feature({"window": (40, 10)}),
    "softcap": Feature({"softcap": 5.0}),
    "alibi": Feature({"causal": True}, _per_head("alibi")),
    "sinks": Feature({}, _per_head("sinks")),
    "dropout": Feature({"dropout": 0.2}),
    "max_logit": Feature({"return_max_logit": True}),
    "all": Feature({"causal": True, "softcap": 5.0, "dropout": 0.2}, _per_head("alibi", "sinks")),
    "score_mod": Feature({"score_mod": lambda s, b, h, i, j: s * 0.5 + (i - j) * 0.01}),
    "mask_mod": Feature({"mask_mod": lambda b, h, i, j: (i + j) % 3 != 0}),
    "deterministic": Feature({"deterministic": True, "causal": True}),
    "bias": Feature({}, _bias, has_varlen=False),
    "bias_constant": Feature({}, partial(_bias, is_constant=True), has_varlen=False),
    # One bias for eight heads, which add to its gradient by atomic additions.
    "bias_shared": Feature({}, partial(_bias, is_shared=True), Sizes(heads=8), has_varlen=False),
    # One bias for two heads, whose terms of its gradient are stored and then summed.
    "bias_terms": Feature({"causal": True}, partial(_bias, is_shared=True), has_varlen=False),
    "block_mask": Feature({}, _block_mask, has_varlen=False),
    # mma.sync alone has kernels for fp32, up to D = 128.
    "fp32": Feature({"causal": True}, dtype=torch.float32),
    # More tiles than an H200 has SMs: persistent CTAs take a second one.
    "many_tiles": Feature({"causal": True}, sizes=Sizes(140, 2, 40, 70), has_varlen=False),
    "narrow_values": Feature({"causal": True}, has_varlen=False, has_narrow_values=True),
    # Partial outputs of context parallelism (`_merge`).
    "merge": Feature(has_varlen=False),
    # The row max of most blocks exceeds that of the blocks before, so a speculative row max fails.
    "large_scores": Feature({"scale": 2.0}, has_varlen=False),
    "long": Feature(sizes=LONG_SIZES),
    "long_causal": Feature({"causal": True}, sizes=LONG_SIZES),
    "long_softcap": Feature({"softcap": 5.0}, sizes=LONG_SIZES),
}
# At these head dims, only these features, dense.
OTHER_HEAD_DIMS = (96, 192, 384, 512)
OTHER_FEATURES = (
    "full", "causal", "softcap", "alibi", "dropout", "deterministic", "bias", "score_mod", "large_scores",
    "narrow_values",
)  # fmt: skip
LONG_FEATURES = ("long", "long_causal", "long_softcap")
LONG_HEAD_DIMS = (96, 192, 256, 512)  # of the Hopper forward
# Varlen kernels differ from dense ones only in lengths and tile lists. So all features run at the smallest head dim,
# and only these at the others.
VARLEN_WIDE = ("causal", "dropout")
WIDEST = 512
LENGTHS = (150, 1, 0, 77)


def _attend(launch: Launch, device: str) -> Sequence[Tensor]:
    """The results of the forward pass, and the gradients of q, k and v; prints if a family has no gradients."""
    feature = FEATURES[launch.feature]
    heads, heads_kv, rows, keys = feature.sizes
    attend: Any = cute_flash.attn
    shapes: list[tuple[int, ...]]
    if launch.kind == VARLEN:
        starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
        attend = partial(cute_flash.attn_varlen, cu_seqlens_q=starts, cu_seqlens_k=starts)
        shapes = [(sum(LENGTHS), n, launch.head_dim) for n in (heads, heads_kv, heads_kv)]
    else:
        width_v = launch.head_dim // 2 if feature.has_narrow_values else launch.head_dim
        shapes = [(1, heads, rows, launch.head_dim), (1, heads_kv, keys, launch.head_dim), (1, heads_kv, keys, width_v)]
    inputs = [_normal(*shape, device=device, dtype=feature.dtype) for shape in shapes]
    with cute_flash.use_kernels(launch.family):
        outputs = attend(*inputs, **feature.keywords, **feature.tensors(feature.sizes, device))
        out: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        dout = torch.ones(out.shape, dtype=out.dtype).to(device)
        try:
            return out, *torch.autograd.grad(out, inputs, dout)
        except UnsupportedError:
            print(f"{SKIPPED} {launch.name}", flush=True)
            return (out,)


def _merge(launch: Launch, device: str) -> Sequence[Tensor]:
    """Merge partial outputs, the second with some of the rows."""
    q = _normal(1, 2, 150, launch.head_dim, device=device).detach()
    output = Output(q, q, num_parts=2)
    for begin in (0, 40):
        out = _normal(1, 2, 150 - begin, launch.head_dim, device=device, dtype=torch.float32).detach()
        output.parts.append(PartialOutput((begin, 150), out, out[..., 0].contiguous()))
    return output.result(None, 150)


# ---- calls of `attn_decode`, and calls of `attn` and `attn_varlen` that split keys

LONG = (3000, 40)  # more keys than one CTA takes


@dataclass(frozen=True)
class DecodeCall:
    """`attn_decode` with 8 query heads on 2 K/V heads; appended rows are rotated.

    With `value_dim`, there is one cache, and appended rows are not rotated. With `has_tables`, each query has a page
    table, which begins with -1.
    """

    lengths: tuple[int, ...] = (300, 1, 0, 77)  # rows of each sequence in the cache
    tokens: tuple[int, ...] = (1, 1, 1, 1)  # of each sequence; different numbers: ragged
    page_size: int | None = None
    appends: bool = False
    is_fp8: bool = False
    num_splits: int | None = None
    heads: int = 8
    heads_kv: int = 2
    value_dim: int | None = None
    has_tables: bool = False

    def cache(self, width: int, seed: int) -> Tensor:
        """Keys or values (B, S, Hkv, D), with NaN beyond the lengths."""
        lengths = torch.tensor(self.lengths) + (torch.tensor(self.tokens) if self.appends else 0)
        longest = int(lengths.max())
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(len(lengths), longest, self.heads_kv, width, generator=generator)
        beyond = torch.arange(longest) >= lengths[:, None]
        return x.masked_fill(beyond[..., None, None], torch.nan)

    def run(self, width: int, device: str) -> Tensor:
        caches, options = [self.cache(width, seed) for seed in (0, 1)], dict[str, Any]()
        if self.page_size is not None:
            caches = [F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % self.page_size), value=torch.nan) for x in caches]
            pages = [x.unflatten(1, (-1, self.page_size)) for x in caches]
            order = torch.randperm(pages[0][..., 0, 0, 0].numel(), generator=torch.Generator().manual_seed(0))
            caches = [x.flatten(0, 1)[order] for x in pages]
            table = order.argsort().view(pages[0].shape[:2]).to(device, torch.int32)
            options["page_table"] = table
            if self.has_tables:
                options["page_table"] = F.pad(table, (1, 0), value=-1)[:, None].expand(-1, self.tokens[0], -1)
        leading: tuple[int, ...] = (len(self.tokens), self.tokens[0])
        if len(set(self.tokens)) > 1:
            leading = (sum(self.tokens),)
            options["cu_seqlens_q"] = torch.tensor([0, *self.tokens]).cumsum(0).to(device, torch.int32)
        if self.appends:
            names = ("k_new", "v_new") if self.value_dim is None else ("k_new",)
            options |= {name: _normal(*leading, self.heads_kv, width, device=device).detach() for name in names}
        if self.appends and self.value_dim is None:
            positions = torch.arange(max(self.lengths) + max(self.tokens))
            angles = torch.outer(positions, torch.linspace(1, 0, width // 2))
            options |= {"rotary_cos": angles.cos().to(device), "rotary_sin": angles.sin().to(device)}
        q = _normal(*leading, self.heads, width, device=device).detach()
        k, v = (x.to(torch.float8_e4m3fn if self.is_fp8 else torch.bfloat16).to(device) for x in caches)
        lengths = torch.tensor(self.lengths, dtype=torch.int32).to(device)
        options["num_splits"] = self.num_splits
        if self.value_dim is None:
            return cute_flash.attn_decode(q, k, v, cache_seqlens=lengths, **options)
        options |= {"value_dim": self.value_dim, "scale": 192**-0.5}
        if self.has_tables:
            # The first page of a table is -1.
            lengths = (lengths + (self.page_size or 0))[:, None].expand(-1, self.tokens[0]).contiguous()
        return cute_flash.attn_decode(q, k, cache_seqlens=lengths, **options)


def _attn(width: int, device: str) -> Tensor:
    """Few queries and many keys."""
    q, k, v = (_normal(1, n, s, width, device=device).detach() for n, s in ((8, 2), (2, 3000), (2, 3000)))
    return cute_flash.attn(q, k, v, causal=True)


def _attn_varlen(width: int, device: str) -> Tensor:
    q, k, v = (_normal(2 * s, n, width, device=device).detach() for n, s in ((8, 2), (2, 3000), (2, 3000)))
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32).to(device) for n in (2, 3000)]
    return cute_flash.attn_varlen(q, k, v, *starts, causal=True)


# Keys of `attn` are split only if the caller does not choose a family.
SPLIT_CALLS = {"attn": _attn, "attn_varlen": _attn_varlen}
DECODE_CALLS = {
    "contiguous": DecodeCall(),
    "append": DecodeCall(appends=True),
    "fp8": DecodeCall(is_fp8=True, appends=True, page_size=16),
    "pages16": DecodeCall(page_size=16),
    "pages1": DecodeCall(page_size=1),
    "ragged": DecodeCall(tokens=(3, 1, 0, 20), appends=True, page_size=24),
    "tokens8": DecodeCall(tokens=(8, 8, 8, 8)),
    "splits3": DecodeCall(LONG, (1, 1), num_splits=3),
    "long": DecodeCall(LONG, (1, 1), page_size=16, appends=True),
}
# Latent caches (MLA), with rows of LATENT_DIM numbers. 16 query heads run by mma.sync, 64 and 128 by wgmma on Hopper.
LATENT_DIM, LATENT_VALUES = 576, 512
_LATENT = {"heads_kv": 1, "value_dim": LATENT_VALUES}
LATENT_CALLS = {
    f"latent{heads}_{name}": DecodeCall(**fields, **_LATENT, heads=heads)  # type: ignore[arg-type]
    for heads in (16, 64, 128)
    for name, fields in {
        "contiguous": {},
        "append": {"appends": True, "page_size": 1},
        "pages64": {"page_size": 64},
        "fp8": {"is_fp8": True, "appends": True, "page_size": 16},
        "tables": {"page_size": 1, "has_tables": True},
        "ragged": {"tokens": (3, 1, 0, 5), "page_size": 24},
        "splits3": {"lengths": LONG, "tokens": (1, 1), "num_splits": 3},
        "long": {"lengths": LONG, "tokens": (2, 2)},
    }.items()
}
# These features run at all head dims, the others at DECODE_DIM only.
DECODE_WIDE, DECODE_DIM = ("contiguous", "append", "fp8"), 128
# At head dim `WIDEST`, where warps divide the columns.
DIVIDED = (*DECODE_WIDE, "pages1", "tokens8", "long")


def _decode(launch: Launch, device: str) -> Sequence[Tensor]:
    if launch.feature in SPLIT_CALLS:
        with cute_flash.use_kernels(""):
            return [SPLIT_CALLS[launch.feature](launch.head_dim, device)]
    with cute_flash.use_kernels(launch.family):
        return [(DECODE_CALLS | LATENT_CALLS)[launch.feature].run(launch.head_dim, device)]


# ---- launches


class Launch(NamedTuple):
    family: str
    head_dim: int
    kind: str  # DENSE, VARLEN or DECODE
    feature: str

    @property
    def name(self) -> str:
        return f"{self.family}-d{self.head_dim}-{self.kind}-{self.feature}"


def _all_launches(families: Iterable[str]) -> Iterator[Launch]:
    families = tuple(families)
    for family, head_dim, feature in product(families, OTHER_HEAD_DIMS, OTHER_FEATURES):
        # A cluster does not compute the gradient of a bias.
        if (family, feature) != ("sm90", "bias") or head_dim <= MAX_NARROW_HEAD_DIM:
            yield Launch(family, head_dim, DENSE, feature)
    for family, head_dim, feature in product(families, LONG_HEAD_DIMS, LONG_FEATURES):
        if family == "sm90":
            yield Launch(family, head_dim, DENSE, feature)
    for family, head_dim, feature in product(families, HEAD_DIMS, (x for x in FEATURES if x not in LONG_FEATURES)):
        if feature == "fp32" and (family, head_dim) not in (("sm80", 64), ("sm80", 128)):
            continue
        yield Launch(family, head_dim, DENSE, feature)
        if FEATURES[feature].has_varlen and (head_dim == HEAD_DIMS[0] or feature in VARLEN_WIDE):
            yield Launch(family, head_dim, VARLEN, feature)
    for family, feature in product(families, VARLEN_WIDE):
        yield Launch(family, WIDEST, VARLEN, feature)
    for family, head_dim, feature in product(families, HEAD_DIMS, (*DECODE_CALLS, *SPLIT_CALLS)):
        is_wide = head_dim == DECODE_DIM or feature in DECODE_WIDE
        if is_wide and (feature not in SPLIT_CALLS or family == FAMILIES[-1]):
            yield Launch(family, head_dim, DECODE, feature)
    for family, feature in product(families, DIVIDED):
        yield Launch(family, WIDEST, DECODE, feature)
    for family, feature in product(families, LATENT_CALLS):
        yield Launch(family, LATENT_DIM, DECODE, feature)


def launches(families: Iterable[str] = FAMILIES, only: str = "*") -> list[Launch]:
    """Every kind of kernel: both families, all features, three head dims, dense, varlen and decode.

    At other head dims up to `WIDEST`, which have tiles of their own, there are fewer features.
    """
    pattern = only if "*" in only else f"*{only}*"
    return [launch for launch in _all_launches(families) if fnmatch(launch.name, pattern)]


def call(launch: Launch, device: str) -> None:
    run = _decode if launch.kind == DECODE else _merge if launch.feature == "merge" else _attend
    for x in run(launch, device):
        if not bool(torch.isfinite(x.detach().cpu()).all()):
            raise SystemExit(f"{launch.name}: a result is not finite")


def run(chosen: Iterable[Launch], device: str = "cuda") -> None:
    for launch in chosen:
        print(f"{BEGIN} {launch.name}", flush=True)
        call(launch, device)
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"{END} {launch.name}", flush=True)


def needed_kernels(chosen: Iterable[Launch], device: str = "cuda") -> list[LaunchKey]:
    """The kernels of the launches, which are not run."""

    def call_once(launch: Launch) -> None:
        # Nothing is computed, so results may fail the check for finite values.
        with suppress(SystemExit):
            call(launch, device)

    return kernels_of_calls(partial(call_once, launch) for launch in chosen)


def names(lines: Iterable[str], word: str) -> list[str]:
    """The names of launches in the output of `run`."""
    return [line.removeprefix(word).strip() for line in lines if line.startswith(f"{word} ")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.counters.sanitize_case", description=__doc__)
    parser.add_argument("names", nargs="+", help="launches, as `python -m profiling sanitize --list` prints them")
    wanted = set(parser.parse_args(argv).names)
    chosen = [launch for launch in launches() if launch.name in wanted]
    if unknown := wanted - {launch.name for launch in chosen}:
        parser.error(f"no such launches: {', '.join(sorted(unknown))}")
    run(chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
