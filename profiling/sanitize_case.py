"""`python -m profiling.sanitize_case`: small launches of every kind of kernel, for a process under compute-sanitizer.

Each launch is one call of `attn` or `attn_varlen` and its gradients. Inputs are made on the CPU, so that few kernels of
torch are checked. A line before and after each launch tells which one a report of the sanitizer belongs to.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from typing import Any

import torch
from torch import Tensor

import cute_flash
from cute_flash.errors import UnsupportedError
from cute_flash.planning.plan import CompileKey
from cute_flash.score_mod.block_mask import BlockMask

FAMILIES = ("sm80", "sm90")
HEAD_DIMS = (64, 128, 256)
# Feature -> keywords of a call; those of tensors are made in `_options`.
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
    "block_mask": {},
    # mma.sync alone has kernels for fp32, up to D = 128.
    "fp32": {"causal": True},
    # More tiles than an H200 has SMs: persistent CTAs take a second one.
    "many_tiles": {"causal": True},
}
DENSE_ONLY = ("bias", "block_mask", "many_tiles")
# Varlen batches have the code of dense ones but for lengths and tile lists: every feature at the smallest head dim,
# these at the others.
VARLEN_WIDE = ("causal", "dropout")
LENGTHS = (150, 1, 0, 77)
BEGIN, END, SKIPPED = "LAUNCH", "DONE", "FORWARD ONLY"


@dataclass(frozen=True)
class Launch:
    family: str
    head_dim: int
    feature: str
    is_varlen: bool

    @property
    def name(self) -> str:
        return f"{self.family}-d{self.head_dim}-{'varlen' if self.is_varlen else 'dense'}-{self.feature}"


def launches(families: Iterable[str] = FAMILIES, only: str = "*") -> list[Launch]:
    """Every kind of kernel: both families, all features, three head dims, dense and varlen."""
    found = []
    for family, head_dim, feature in product(families, HEAD_DIMS, FEATURES):
        if feature == "fp32" and (family, head_dim) not in (("sm80", 64), ("sm80", 128)):
            continue
        found.append(Launch(family, head_dim, feature, is_varlen=False))
        has_varlen = feature not in DENSE_ONLY and (head_dim == HEAD_DIMS[0] or feature in VARLEN_WIDE)
        if has_varlen:
            found.append(Launch(family, head_dim, feature, is_varlen=True))
    return [launch for launch in found if fnmatch(launch.name, only)]


def _normal(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()


def _options(launch: Launch, heads: int, lengths: tuple[int, int], device: str) -> dict[str, Any]:
    options = dict(FEATURES[launch.feature])
    if launch.feature in ("alibi", "all"):
        options["alibi"] = _normal(heads, device=device, dtype=torch.float32)
    if launch.feature in ("sinks", "all"):
        options["sinks"] = _normal(heads, device=device, dtype=torch.float32)
    if launch.feature == "bias":
        options["bias"] = _normal(1, heads, *lengths, device=device)
    if launch.feature == "block_mask":
        options["block_mask"] = BlockMask.of(lambda b, h, i, j: (i - j).abs() < 60, (1, heads, *lengths), device=device)
    return options


def call(launch: Launch, device: str) -> None:
    """The forward pass and the gradients of q, k and v; prints if a family has no gradients.

    There are more keys than the stages of a pipeline hold, so that stages are written again after they were read.
    """
    heads, heads_kv, rows, keys = (140, 2, 40, 70) if launch.feature == "many_tiles" else (2, 1, 150, 600)
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
    for x in (out, *gradients):
        if not bool(torch.isfinite(x.detach().cpu()).all()):
            raise SystemExit(f"{launch.name}: a result is not finite")


def run(chosen: Iterable[Launch], device: str = "cuda") -> None:
    for launch in chosen:
        print(f"{BEGIN} {launch.name}", flush=True)
        call(launch, device)
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"{END} {launch.name}", flush=True)


def needed_kernels(chosen: Iterable[Launch], device: str = "cuda") -> list[CompileKey]:
    """The kernels of the launches, which are not run."""
    from profiling.host import recorded_launches

    keys: dict[CompileKey, None] = {}
    for launch in chosen:
        with recorded_launches(is_dry=True) as recorded:
            # Results of launches that do nothing may be anything.
            try:
                call(launch, device)
            except SystemExit:
                pass
        keys.update(dict.fromkeys(one.key for one in recorded))
    return list(keys)


def names(lines: Iterable[str], word: str) -> Iterator[str]:
    """The names of launches in the output of `run`."""
    return (line.removeprefix(word).strip() for line in lines if line.startswith(f"{word} "))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.sanitize_case", description=__doc__)
    parser.add_argument("names", nargs="+", help="launches, as `python -m profiling sanitize --list` prints them")
    wanted = set(parser.parse_args(argv).names)
    chosen = [launch for launch in launches() if launch.name in wanted]
    if unknown := wanted - {launch.name for launch in chosen}:
        parser.error(f"no such launches: {', '.join(sorted(unknown))}")
    run(chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
