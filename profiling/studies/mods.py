"""The cost of score_mod, mask_mod, biases and block masks, forward and backward.

    function    a score_mod or a mask_mod against compiled FlexAttention and FlashAttention-4 with the same mod
    documents   a document mask of eight equal documents with its block mask, against the same without one
    bias        a bias against plain attention on the same tensors

Cells and ratios are those of `features`: above 1 the call is faster than its base. In `function` and `documents`, a
call whose results differ from ours is not timed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cute_flash.tools.progress import steps
from profiling.counters.ncu import run_command
from profiling.measure.options import name_list, settings_of
from profiling.measure.study import FAILED, OK, Command, need_gpu
from profiling.measure.tables import Table, geometric_mean, print_unavailable
from profiling.peers import fa4_mods
from profiling.studies import features
from profiling.studies.features import (
    DIRECTIONS,
    AutogradCall,
    Cell,
    CellResult,
    Cells,
    Implementation,
    Settings,
    random_qkv,
)

NUM_DOCUMENTS = 8
# Softcap; index of distance 0 in the relative-position table, and its length; lengths of prefix and window.
CAP, NEAR, DISTANCES, PREFIX, WINDOW = 20.0, 128, 256, 1024, 1024
FIRST_SLOPE, LAST_SLOPE = 0.5, 0.01
OURS, PEERS = "cute_flash", ("flex", "fa4")
WITHOUT_BLOCK_MASK, WITH_BLOCK_MASK, PLAIN = "without a block mask", "with a block mask", "plain"
WITH_GRADIENT = "and its gradient"  # of a bias
FUNCTIONS = ("alibi", "capped", "relative", "causal", "prefix", "window")


@dataclass(frozen=True)
class Function:
    """The score_mod or mask_mod of `attn` and FlexAttention, and a factory of the same for FlashAttention-4."""

    mods: dict[str, Any]  # keyword arguments
    fa4: Callable[[], Any]


def _functions(heads: int, device: torch.device, seed: int = 0) -> dict[str, Function]:
    from cute_flash import masks

    step = (LAST_SLOPE - FIRST_SLOPE) / max(1, heads - 1)
    slopes = torch.arange(heads, device=device) * step + FIRST_SLOPE
    generator = torch.Generator(device).manual_seed(seed)
    table = torch.randn(heads, DISTANCES, generator=generator, device=device)
    near, cap = NEAR, CAP

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx).abs()

    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    def relative(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, (q_idx - kv_idx + near).clamp(0, 255)]

    return {
        "alibi": Function({"score_mod": alibi}, partial(fa4_mods.function, "alibi", FIRST_SLOPE, step)),
        "capped": Function({"score_mod": capped}, partial(fa4_mods.function, "capped", CAP)),
        "relative": Function({"score_mod": relative}, partial(fa4_mods.function, "relative", table, NEAR)),
        "causal": Function({"mask_mod": masks.causal()}, partial(fa4_mods.function, "causal")),
        "prefix": Function({"mask_mod": masks.prefix_lm(PREFIX)}, partial(fa4_mods.function, "prefix", PREFIX)),
        "window": Function({"mask_mod": masks.sliding_window(WINDOW)}, partial(fa4_mods.function, "window", WINDOW)),
    }


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Every function and size is a compilation; past the limit torch would silently run it uncompiled.
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(flex_attention, dynamic=False)


def _flex(inputs: tuple[Tensor, ...], mods: dict[str, Any]) -> AutogradCall:
    """FlexAttention, compiled on a GPU; its block mask is made outside the timed calls."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seqlen, device = inputs[0].shape[2], inputs[0].device
    options: dict[str, Any] = {"score_mod": mods.get("score_mod")}
    if "mask_mod" in mods:
        options["block_mask"] = create_block_mask(mods["mask_mod"], None, None, seqlen, seqlen, device=device)
    function: Any = _compiled_flex() if device.type == "cuda" else flex_attention
    return AutogradCall(partial(function, **options), inputs)


def _ours(inputs: tuple[Tensor, ...], mods: dict[str, Any], has_block_mask: bool = True) -> AutogradCall:
    from cute_flash import BlockMask, attn

    batch, heads, seqlen, _ = inputs[0].shape
    options = dict(mods)
    if "mask_mod" in mods and has_block_mask:
        shape = batch, heads, seqlen, seqlen
        options["block_mask"] = BlockMask.of(mods["mask_mod"], shape, device=inputs[0].device)
    return AutogradCall(partial(attn, **options), inputs)


def _inputs(settings: Settings, device: torch.device) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Inputs of two lengths, with the same number of tokens."""
    for head_dim in settings.head_dims:
        for seqlen in (settings.seqlen, settings.long):
            batch = max(1, settings.batch * settings.seqlen // seqlen)
            heads = settings.hidden // head_dim
            yield f"D={head_dim} S={seqlen}", random_qkv(settings, device, batch, heads, seqlen, head_dim)


def _chosen(wanted: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """The wanted names, or all known names if none is wanted; `ValueError` for an unknown name."""
    for name in wanted:
        if name not in known:
            raise ValueError(f"{name!r}: choose from {', '.join(known)}")
    return wanted or known


def unavailable(settings: Settings) -> dict[str, str]:
    """The peers that are left out, with the reason. A peer that was named is not left out: it fails in every cell."""
    reason = None if settings.peers else fa4_mods.missing()
    return {} if reason is None else {"fa4": reason}


def _peers(inputs: tuple[Tensor, ...], function: Function, settings: Settings) -> dict[str, Implementation]:
    peers: dict[str, Callable[[], Implementation]] = {
        "flex": lambda: _flex(inputs, function.mods),
        "fa4": lambda: fa4_mods.Fa4Call(inputs, function.fa4, function.mods.get("mask_mod")),
    }
    left_out = unavailable(settings)
    return {name: peers[name]() for name in _chosen(settings.peers, PEERS) if name not in left_out}


def function_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    chosen = _chosen(settings.functions, FUNCTIONS)
    for name, inputs in _inputs(settings, device):
        functions = _functions(inputs[0].shape[1], device)
        for kind in chosen:
            calls = _peers(inputs, functions[kind], settings)
            calls[OURS] = _ours(inputs, functions[kind].mods)
            yield Cell("function", f"{name} {kind}", calls, next(iter(calls)), OURS)


def document_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import masks

    for name, inputs in _inputs(settings, device):
        seqlen = inputs[0].shape[2]
        ids = torch.arange(seqlen, device=device, dtype=torch.int32) // -(-seqlen // NUM_DOCUMENTS)
        function = Function({"mask_mod": masks.document(ids)}, partial(fa4_mods.function, "document", ids))
        calls: dict[str, Implementation] = {
            WITHOUT_BLOCK_MASK: _ours(inputs, function.mods, has_block_mask=False),
            WITH_BLOCK_MASK: _ours(inputs, function.mods),
            **_peers(inputs, function, settings),
        }
        yield Cell("documents", name, calls, WITHOUT_BLOCK_MASK, WITH_BLOCK_MASK)


def bias_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn

    for name, inputs in _inputs(settings, device):
        batch, heads, seqlen, _ = inputs[0].shape
        if seqlen > settings.seqlen:
            continue  # a bias of all pairs of long sequences takes most of a GPU's memory
        calls = {PLAIN: AutogradCall(attn, inputs)}
        shapes = {
            "each head": (1, heads, seqlen, seqlen),
            "all": (batch, heads, seqlen, seqlen),
            "each key": (batch, 1, 1, seqlen),
        }
        for what, shape in shapes.items():
            bias = torch.randn(shape, device=device, dtype=torch.bfloat16)
            calls[f"bias of {what}"] = AutogradCall(partial(attn, bias=bias), inputs)
            if what != "each key":
                leaf = bias.detach().requires_grad_()
                calls[f"bias of {what} {WITH_GRADIENT}"] = AutogradCall(partial(attn, bias=leaf), inputs)
        yield Cell("bias", name, calls, PLAIN)


KINDS: dict[str, Cells] = {"function": function_cells, "documents": document_cells, "bias": bias_cells}


# ---- the summary
# -------------------------------------------------------------------------------------------------------


SUMMARY_COLUMNS = ("geometric mean (lowest)", "cells", "fwd", "bwd", "both")


def _row(label: str, results: Iterable[CellResult], call: str, base: str) -> tuple[str, ...] | None:
    """One mean for each direction; None if no cell has both calls."""
    cells = list(results)
    texts, counts = [], []
    for direction in (*DIRECTIONS, "both"):
        ratios = [x for x in (one.ratio(call, direction, base) for one in cells) if x is not None]
        counts.append(len(ratios))
        texts.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "-")
    if not any(counts):
        return None
    # If the directions differ, some cells failed; the failures are printed after the tables.
    number = f"{counts[0]}" if len(set(counts)) == 1 else f"{counts[0]}, {counts[1]}"
    return (label, number, *texts)


def summary(results: Sequence[CellResult]) -> Table:
    """Ours over each peer with the same function, with a block mask over without, each bias over plain."""

    def of(kind: str) -> list[CellResult]:
        return [one for one in results if one.kind == kind]

    biases = dict.fromkeys(call for one in of("bias") for call in one.samples["fwd"] if call != PLAIN)
    rows = [
        *(_row(f"functions: {OURS} over {peer}", of("function"), OURS, peer) for peer in PEERS),
        *(
            _row(f"documents: {WITH_BLOCK_MASK} over {base}", of("documents"), WITH_BLOCK_MASK, base)
            for base in (WITHOUT_BLOCK_MASK, *PEERS)
        ),
        *(_row(f"{bias} over {PLAIN}", of("bias"), bias, PLAIN) for bias in biases),
    ]
    return Table("summary", SUMMARY_COLUMNS, tuple(row for row in rows if row is not None))


# ---- one process for each kind of cell, head dim and function (--parallel)
# -------------------------------------------------------------------------------------------------------


PROCESS_LIMIT_S = 600.0
# Arguments of `python -m profiling` -> exit status and output.
ProcessRunner = Callable[[Sequence[str]], tuple[int, str]]


# FlexAttention and FlashAttention-4 compile each function at its first call, for 10 to 30 s. The processes compile at
# the same time and measure one after another (`GpuLock`). Each writes a file; the files are then merged.
def choices(kinds: Sequence[str], head_dims: Sequence[int], functions: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The options by which the processes differ."""
    for head_dim in head_dims:
        for kind in kinds:
            options = ("--kinds", kind, "--head-dims", str(head_dim))
            if kind == "function":
                yield from ((*options, "--functions", name) for name in functions)
            else:
                yield options


def run_all(
    common: Sequence[str],
    chosen: Sequence[Sequence[str]],
    folder: Path,
    run_process: ProcessRunner,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Run `mods` with the common options and those of each process; return the files. A lost process is an error."""
    paths = [folder / f"{i}.json" for i in range(len(chosen))]

    def measure(i: int) -> str | None:
        own = ("--jobs", "1", "--lock", str(folder / "lock"), "--out", str(paths[i]))
        status, output = run_process(("mods", *common, *chosen[i], *own))
        progress(" ".join(chosen[i][1::2]))
        lines = output.strip().splitlines()[-5:]
        has_ended = status in (OK, FAILED) and paths[i].exists()
        return None if has_ended else f"{' '.join(chosen[i])}: exit status {status}: {' / '.join(lines)}"

    # All at once: a process that started later would make the others wait until it has compiled.
    with ThreadPoolExecutor(len(chosen)) as pool:
        errors = [error for error in pool.map(measure, range(len(chosen))) if error is not None]
    if errors:
        print("\n".join(errors), file=sys.stderr)
        raise ValueError(f"--parallel: {len(errors)} of {len(chosen)} processes did not end")
    return paths


# ---- the command
# -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    features.add_arguments(parser, KINDS)
    add("--functions", type=name_list, default=(), metavar="LIST", help=f"default: {','.join(FUNCTIONS)}")
    add("--peers", type=name_list, default=(), metavar="LIST", help=f"default: {','.join(PEERS)}")
    add("--parallel", action="store_true", help="compile in a process for each function and head dim")


def _run_in_processes(args: argparse.Namespace, settings: features.Settings, folder: Path) -> list[Path]:
    chosen = list(choices(args.kinds, settings.head_dims, settings.functions or FUNCTIONS))
    values = {"kernels": args.kernels, "rounds": settings.rounds, "ms": settings.ms, "seed": settings.seed}
    common = [f"--{name}={x}" for name, x in values.items()]
    common += [f"--peers={','.join(settings.peers)}"] * bool(settings.peers)

    def run_process(arguments: Sequence[str]) -> tuple[int, str]:
        return run_command([sys.executable, "-m", "profiling", *arguments], PROCESS_LIMIT_S)

    with steps("measuring mods", len(chosen)) as done:
        return run_all(common, chosen, folder, run_process, done)


def run(args: argparse.Namespace) -> int:
    settings = replace(settings_of(features.Settings, args), functions=args.functions, peers=args.peers)
    if args.parallel and not args.parts:
        need_gpu()
        with tempfile.TemporaryDirectory() as folder:
            args.parts = _run_in_processes(args, settings, Path(folder))
            results = features.merge_parts(args, KINDS)
    elif args.parts:
        results = features.merge_parts(args, KINDS)
    else:
        need_gpu()
        print_unavailable(unavailable(settings))
        results = features.measure_kinds(args, settings, KINDS)
    return features.report(results, [summary(results)])


COMMAND = Command(
    "mods",
    "score_mod, mask_mod and bias beside FlexAttention and FA4",
    ("--functions alibi,causal --peers flex",),
    add_arguments,
    run,
)
