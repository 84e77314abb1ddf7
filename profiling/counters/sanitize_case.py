"""`python -m profiling.counters.sanitize_case`: small launches of every kind of kernel, under compute-sanitizer.

Each launch is one call of `attn` or `attn_varlen` and its gradients, or a call of `attn_decode`. Inputs are made on the
CPU, so that few kernels of torch are checked. A line is printed before and after each launch, to assign the sanitizer's
reports to launches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import cute_flash
from cute_flash.distributed.accumulate import Output, PartialOutput
from cute_flash.errors import UnsupportedError
from cute_flash.planning.plan import CompileKey
from cute_flash.score_mod.block_mask import BlockMask
from profiling.measure.launches import needed_kernels as kernels_of_calls

FAMILIES = ("sm80", "sm90")
HEAD_DIMS = (64, 128, 256)
# Feature -> keywords of a call; `_options` adds those whose values are tensors.
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (40, 10)},
    "softcap": {"softcap": 5.0},
    "alibi": {"causal": True},
    "sinks": {},
    "dropout": {"dropout": 0.2},
    "max_logit": {"return_max_logit": True},
    "all": {"causal": True, "softcap": 5.0, "dropout": 0.2},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s * 0.5 + (i - j) * 0.01},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j) % 3 != 0},
    "deterministic": {"deterministic": True, "causal": True},
    "bias": {},
    "bias_constant": {},
    # One bias for eight heads, which add to its gradient by atomic additions.
    "bias_shared": {},
    # One bias for two heads, whose terms of its gradient are stored and then summed.
    "bias_terms": {"causal": True},
    "block_mask": {},
    # mma.sync alone has kernels for fp32, up to D = 128.
    "fp32": {"causal": True},
    # More tiles than an H200 has SMs: persistent CTAs take a second one.
    "many_tiles": {"causal": True},
    # Partial outputs of context parallelism.
    "merge": {},
    # The row max of most blocks exceeds that of the blocks before, so a speculative row max fails.
    "large_scores": {"scale": 2.0},
    # Tiles for many keys.
    "long": {},
    "long_causal": {"causal": True},
    "long_softcap": {"softcap": 5.0},
}
# At these head dims, only these features, dense.
OTHER_HEAD_DIMS = (96, 192)
OTHER_FEATURES = ("full", "causal", "softcap", "alibi", "dropout", "deterministic", "bias", "score_mod", "large_scores")
LONG_FEATURES = ("long", "long_causal", "long_softcap")
LONG_HEAD_DIMS = (96, 192, 256)  # of the Hopper forward
DENSE_ONLY = ("bias", "bias_constant", "bias_shared", "bias_terms", "block_mask", "many_tiles", "merge", "large_scores")
# Varlen kernels differ from dense ones only in lengths and tile lists. So all features run at the smallest head dim,
# and only these at the others.
VARLEN_WIDE = ("causal", "dropout")
LENGTHS = (150, 1, 0, 77)
# `attn_decode`: rows of each sequence in the cache, and tokens.
DECODE_LENGTHS, TOKENS = (300, 1, 0, 77), 8
LONG = (3000, 40)  # more keys than one CTA takes
# Feature -> the fields of `_decode_call` that it changes.
DECODE: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "append": {"appends": True},
    "fp8": {"is_fp8": True, "appends": True, "page_size": 16},
    "pages16": {"page_size": 16},
    "pages1": {"page_size": 1},
    "ragged": {"tokens": (3, 1, 0, 20), "appends": True, "page_size": 24},
    "tokens8": {"tokens": (TOKENS,) * 4},
    "splits3": {"lengths": LONG, "num_splits": 3},
    "long": {"lengths": LONG, "page_size": 16, "appends": True},
    # Calls of attn and attn_varlen that split keys. Keys are split only if the caller does not choose a family.
    "attn": {},
    "attn_varlen": {},
}
SPLIT_CALLS = ("attn", "attn_varlen")
# These features run at all head dims, the others at DECODE_DIM only.
DECODE_WIDE, DECODE_DIM = ("contiguous", "append", "fp8"), 128
BEGIN, END, SKIPPED = "LAUNCH", "DONE", "FORWARD ONLY"


@dataclass(frozen=True)
class Launch:
    family: str
    head_dim: int
    feature: str
    is_varlen: bool = False
    is_decode: bool = False

    @property
    def name(self) -> str:
        kind = "decode" if self.is_decode else "varlen" if self.is_varlen else "dense"
        return f"{self.family}-d{self.head_dim}-{kind}-{self.feature}"


def launches(families: Iterable[str] = FAMILIES, only: str = "*") -> list[Launch]:
    """Every kind of kernel: both families, all features, three head dims, dense, varlen and decode.

    At other head dims, which have tiles of their own, there are fewer features.
    """
    families = tuple(families)
    found = [Launch(*place) for place in product(families, OTHER_HEAD_DIMS, OTHER_FEATURES)]
    found += [Launch(*place) for place in product(families, LONG_HEAD_DIMS, LONG_FEATURES) if place[0] == "sm90"]
    for family, head_dim, feature in product(families, HEAD_DIMS, (x for x in FEATURES if x not in LONG_FEATURES)):
        if feature == "fp32" and (family, head_dim) not in (("sm80", 64), ("sm80", 128)):
            continue
        found.append(Launch(family, head_dim, feature, is_varlen=False))
        has_varlen = feature not in DENSE_ONLY and (head_dim == HEAD_DIMS[0] or feature in VARLEN_WIDE)
        if has_varlen:
            found.append(Launch(family, head_dim, feature, is_varlen=True))
    for family, head_dim, feature in product(families, HEAD_DIMS, DECODE):
        is_wide = head_dim == DECODE_DIM or feature in DECODE_WIDE
        if is_wide and (feature not in SPLIT_CALLS or family == FAMILIES[-1]):
            found.append(Launch(family, head_dim, feature, is_decode=True))
    pattern = only if "*" in only else f"*{only}*"
    return [launch for launch in found if fnmatch(launch.name, pattern)]


def _normal(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()


def _options(launch: Launch, heads: int, lengths: tuple[int, int], device: str) -> dict[str, Any]:
    options = dict(FEATURES[launch.feature])
    if launch.feature in ("alibi", "all"):
        options["alibi"] = _normal(heads, device=device, dtype=torch.float32)
    if launch.feature in ("sinks", "all"):
        options["sinks"] = _normal(heads, device=device, dtype=torch.float32)
    if launch.feature.startswith("bias"):
        shape = (1, 1 if launch.feature in ("bias_shared", "bias_terms") else heads, *lengths)
        options["bias"] = _normal(*shape, device=device).requires_grad_(launch.feature != "bias_constant")
    if launch.feature == "block_mask":
        options["block_mask"] = BlockMask.of(lambda b, h, i, j: (i - j).abs() < 60, (1, heads, *lengths), device=device)
    return options


def _caches(
    lengths: Sequence[int], width: int, page_size: int | None, device: str
) -> tuple[list[Tensor], Tensor | None]:
    """K and V of two heads, (B, S, 2, D) or pages, with NaN beyond the lengths; and the page table."""
    longest = max(lengths)
    rows = [torch.full((len(lengths), longest, 2, width), torch.nan) for _ in range(2)]
    for i, x in enumerate(rows):
        for b, length in enumerate(lengths):
            x[b, :length] = torch.randn(length, 2, width, generator=torch.Generator().manual_seed(10 * i + b))
    if page_size is None:
        return [x.to(device) for x in rows], None
    num_pages = -(-longest // page_size)
    table = torch.randperm(len(lengths) * num_pages, generator=torch.Generator().manual_seed(0))
    table = table.view(len(lengths), num_pages)
    pages = []
    for x in rows:
        padded = torch.full((len(lengths), num_pages * page_size, 2, width), torch.nan)
        padded[:, :longest] = x
        pages.append(torch.empty(table.numel(), page_size, 2, width))
        pages[-1][table] = padded.unflatten(1, (num_pages, page_size))
    return [x.to(device) for x in pages], table.to(device, torch.int32)


def _decode_call(
    width: int,
    device: str,
    lengths: Sequence[int] = DECODE_LENGTHS,
    tokens: Sequence[int] = (),  # of each sequence; different numbers: ragged
    page_size: int | None = None,
    appends: bool = False,
    is_fp8: bool = False,
    num_splits: int | None = None,
) -> Tensor:
    """`attn_decode` with 8 query heads on 2 K/V heads; appended rows are rotated."""
    tokens = tokens or (1,) * len(lengths)
    new = tokens if appends else (0,) * len(lengths)
    (k, v), table = _caches([a + b for a, b in zip(lengths, new)], width, page_size, "cpu")
    dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    k, v = (x.to(dtype).to(device) for x in (k, v))
    is_ragged = len(set(tokens)) > 1
    leading = (sum(tokens),) if is_ragged else (len(lengths), tokens[0])
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32).to(device)}
    options |= {"page_table": None if table is None else table.to(device), "num_splits": num_splits}
    if is_ragged:
        options["cu_seqlens_q"] = torch.tensor([0, *tokens]).cumsum(0).to(device, torch.int32)
    if appends:
        options |= {name: _normal(*leading, 2, width, device=device).detach() for name in ("k_new", "v_new")}
        angles = torch.outer(torch.arange(max(lengths) + max(tokens)), torch.linspace(1, 0, width // 2))
        options |= {"rotary_cos": angles.cos().to(device), "rotary_sin": angles.sin().to(device)}
    q = _normal(*leading, 8, width, device=device).detach()
    return cute_flash.attn_decode(q, k, v, **options)


def _split_call(launch: Launch, device: str) -> Tensor:
    """A call of `attn` or `attn_varlen` with few queries and many keys."""
    rows, keys = 2, max(LONG)
    if launch.feature == "attn":
        q, *kv = (_normal(1, n, s, launch.head_dim, device=device) for n, s in ((8, rows), (2, keys), (2, keys)))
        return cute_flash.attn(q.detach(), *(x.detach() for x in kv), causal=True)
    q, *kv = (_normal(s, n, launch.head_dim, device=device) for n, s in ((8, 2 * rows), (2, 2 * keys), (2, 2 * keys)))
    offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32).to(device) for n in (rows, keys)]
    return cute_flash.attn_varlen(q.detach(), *(x.detach() for x in kv), *offsets, causal=True)


def _call_decode(launch: Launch, device: str) -> None:
    is_split = launch.feature in SPLIT_CALLS
    with cute_flash.use_kernels("" if is_split else launch.family):
        out = (
            _split_call(launch, device) if is_split else _decode_call(launch.head_dim, device, **DECODE[launch.feature])
        )
    _check_finite(launch, [out])


def _check_finite(launch: Launch, results: Iterable[Tensor]) -> None:
    for x in results:
        if not bool(torch.isfinite(x.detach().cpu()).all()):
            raise SystemExit(f"{launch.name}: a result is not finite")


def _call_merge(launch: Launch, device: str) -> None:
    """Merge partial outputs, the second with some of the rows."""
    q = _normal(1, 2, 150, launch.head_dim, device=device).detach()
    output = Output(q, q, num_parts=2)
    for begin in (0, 40):
        out = _normal(1, 2, 150 - begin, launch.head_dim, device=device, dtype=torch.float32).detach()
        output.parts.append(PartialOutput((begin, 150), out, out[..., 0].contiguous()))
    _check_finite(launch, output.result(None, 150))


def call(launch: Launch, device: str) -> None:
    """The forward pass and the gradients of q, k and v; prints if a family has no gradients.

    There are more keys than the stages of a pipeline hold, so that stages are written again after they were read.
    """
    if launch.is_decode:
        return _call_decode(launch, device)
    if launch.feature == "merge":
        return _call_merge(launch, device)
    sizes = {"many_tiles": (140, 2, 40, 70), "bias_shared": (8, 1, 150, 600)}
    sizes |= dict.fromkeys(LONG_FEATURES, (2, 1, 250, 2400))
    heads, heads_kv, rows, keys = sizes.get(launch.feature, (2, 1, 150, 600))
    attend: Any = cute_flash.attn_varlen if launch.is_varlen else cute_flash.attn
    shapes: list[tuple[int, ...]]
    lengths: tuple[Tensor, ...] = ()
    if launch.is_varlen:
        keys = rows = sum(LENGTHS)
        starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
        shapes, lengths = [(rows, n, launch.head_dim) for n in (heads, heads_kv, heads_kv)], (starts, starts)
    else:
        counts = ((heads, rows), (heads_kv, keys), (heads_kv, keys))
        shapes = [(1, n, s, launch.head_dim) for n, s in counts]
    dtype = torch.float32 if launch.feature == "fp32" else torch.bfloat16
    inputs = [_normal(*shape, device=device, dtype=dtype) for shape in shapes]
    options = _options(launch, heads, (rows, keys), device)
    with cute_flash.use_kernels(launch.family):
        outputs = attend(*inputs, *lengths, **options)
        out = outputs[0] if isinstance(outputs, tuple) else outputs
        dout = torch.ones(out.shape, dtype=out.dtype).to(device)
        try:
            gradients: Sequence[Tensor] = torch.autograd.grad(out, inputs, dout)
        except UnsupportedError:
            print(f"{SKIPPED} {launch.name}", flush=True)
            gradients = ()
    _check_finite(launch, (out, *gradients))


def run(chosen: Iterable[Launch], device: str = "cuda") -> None:
    for launch in chosen:
        print(f"{BEGIN} {launch.name}", flush=True)
        call(launch, device)
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"{END} {launch.name}", flush=True)


def needed_kernels(chosen: Iterable[Launch], device: str = "cuda") -> list[CompileKey]:
    """The kernels of the launches, which are not run."""

    def call_once(launch: Launch) -> None:
        # Nothing is computed, so results may fail the check for finite values.
        with suppress(SystemExit):
            call(launch, device)

    return kernels_of_calls(partial(call_once, launch) for launch in chosen)


def names(lines: Iterable[str], word: str) -> Iterator[str]:
    """The names of launches in the output of `run`."""
    return (line.removeprefix(word).strip() for line in lines if line.startswith(f"{word} "))


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
