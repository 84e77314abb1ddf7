"""The cost of score_mod, mask_mod, biases and block masks, forward and backward.

    function    a score_mod or a mask_mod against compiled FlexAttention and FlashAttention-4 with the same mod
    documents   a document mask of eight equal documents with its block mask, against the same without one
    bias        a bias against plain attention on the same tensors

Cells and ratios are those of `features`: above 1 the call is faster than its base. In `function` and `documents`, a
call whose results differ from ours is not timed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cute_flash
from cute_flash import masks
from cute_flash.jit.kernels import precompile_all
from profiling.measure.gpu_lock import GpuLock
from profiling.measure.options import MS, ROUNDS, SEED, option, settings_of
from profiling.measure.study import Record, Step, Study, Tools
from profiling.measure.tables import Table, geometric_mean
from profiling.measure.workers import Outcome, Pool, Task
from profiling.peers import fa4_mods
from profiling.peers.cute_flash import our_peer
from profiling.peers.directions import DIRECTIONS
from profiling.peers.flex import shared_compiled_flex
from profiling.peers.peer import KERNELS
from profiling.studies import features
from profiling.studies.features import Cell, CellCall, Sizes, kernels_of, measure_cells, ours, random_qkv, ratio

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


def _flex(inputs: Sequence[Tensor], mods: dict[str, Any]) -> CellCall:
    """FlexAttention, compiled on a GPU; its block mask is made outside the timed calls."""
    seqlen, device = inputs[0].shape[2], inputs[0].device
    options: dict[str, Any] = {"score_mod": mods.get("score_mod")}
    if "mask_mod" in mods:
        options["block_mask"] = create_block_mask(mods["mask_mod"], None, None, seqlen, seqlen, device=device)
    function: Any = shared_compiled_flex() if device.type == "cuda" else flex_attention
    return CellCall(partial(features.through_autograd, partial(function, **options), inputs))


def _ours(inputs: Sequence[Tensor], mods: dict[str, Any]) -> CellCall:
    """`attn` with mods; a mask_mod has its block mask."""
    batch, heads, seqlen, _ = inputs[0].shape
    options = dict(mods)
    if "mask_mod" in mods:
        shape = batch, heads, seqlen, seqlen
        options["block_mask"] = cute_flash.BlockMask.of(mods["mask_mod"], shape, device=inputs[0].device)
    return ours(cute_flash.attn, inputs, **options)


@dataclass(frozen=True)
class Settings:
    kinds: tuple[str, ...] = option(("function", "documents", "bias"), choices=("function", "documents", "bias"))
    functions: tuple[str, ...] = option(FUNCTIONS, choices=FUNCTIONS)
    peers: tuple[str, ...] = option((), "default: those that are installed", choices=PEERS)
    kernels: str = option("auto", "kernel family of cute_flash", choices=KERNELS)
    head_dims: tuple[int, ...] = option((64, 128))
    sizes: Sizes = field(default_factory=Sizes)
    rounds: int = ROUNDS(6)
    ms: float = MS(15.0)
    seed: int = SEED(0)

    def groups(self, device: torch.device) -> dict[str, Callable[[], Iterator[Cell]]]:
        """The cells of each kind, head dim and function. Their tensors are made when they are measured."""
        return {title: partial(_cells, one, device) for title, one in self.parts().items()}

    def parts(self) -> dict[str, Settings]:
        """The settings of each group."""
        return {
            " ".join([kind, f"D={head_dim}", *functions]): replace(
                self, kinds=(kind,), head_dims=(head_dim,), functions=functions
            )
            for kind in self.kinds
            for head_dim in self.head_dims
            for functions in ([(name,) for name in self.functions] if kind == "function" else [()])
        }


def unavailable(settings: Settings) -> dict[str, str]:
    """The peers that are left out, with the reason. A peer that was named is not left out: it fails in every cell."""
    reason = None if settings.peers else fa4_mods.missing()
    return {} if reason is None else {"fa4": reason}


def _peers(inputs: Sequence[Tensor], function: Function, settings: Settings) -> dict[str, CellCall]:
    left_out = unavailable(settings)
    makes: dict[str, Callable[[], CellCall]] = {
        "flex": lambda: _flex(inputs, function.mods),
        "fa4": lambda: CellCall(
            partial(fa4_mods.prepare, inputs, function.fa4, function.mods.get("mask_mod")), is_bshd=True
        ),
    }
    return {name: makes[name]() for name in settings.peers or PEERS if name not in left_out}


def _cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    """The cells of one group: of two lengths, with the same number of tokens."""
    (kind,), (head_dim,), sizes = settings.kinds, settings.head_dims, settings.sizes
    for seqlen in (sizes.seqlen, sizes.long):
        batch, heads = max(1, sizes.batch * sizes.seqlen // seqlen), sizes.hidden // head_dim
        inputs = random_qkv(settings.seed, device, batch, heads, seqlen, head_dim)
        place = f"D={head_dim} S={seqlen}"
        if kind == "function":
            (name,) = settings.functions
            function = _functions(heads, device)[name]
            calls = {**_peers(inputs, function, settings), OURS: _ours(inputs, function.mods)}
            yield Cell("function", f"{place} {name}", calls, next(iter(calls)), OURS)
        elif kind == "documents":
            ids = torch.arange(seqlen, device=device, dtype=torch.int32) // -(-seqlen // NUM_DOCUMENTS)
            function = Function({"mask_mod": masks.document(ids)}, partial(fa4_mods.function, "document", ids))
            calls = {
                WITHOUT_BLOCK_MASK: ours(cute_flash.attn, inputs, **function.mods),
                WITH_BLOCK_MASK: _ours(inputs, function.mods),
                **_peers(inputs, function, settings),
            }
            yield Cell("documents", place, calls, WITHOUT_BLOCK_MASK, WITH_BLOCK_MASK)
        elif seqlen <= sizes.seqlen:  # a bias of all pairs of long sequences takes most of a GPU's memory
            yield Cell("bias", place, _bias_calls(inputs), PLAIN)


def _bias_calls(inputs: Sequence[Tensor]) -> dict[str, CellCall]:
    batch, heads, seqlen, _ = inputs[0].shape
    calls = {PLAIN: ours(cute_flash.attn, inputs)}
    shapes = {
        "each head": (1, heads, seqlen, seqlen),
        "all": (batch, heads, seqlen, seqlen),
        "each key": (batch, 1, 1, seqlen),
    }
    for what, shape in shapes.items():
        bias = torch.randn(shape, device=inputs[0].device, dtype=torch.bfloat16)
        calls[f"bias of {what}"] = ours(cute_flash.attn, inputs, bias=bias)
        if what != "each key":
            leaf = bias.detach().requires_grad_()
            calls[f"bias of {what} {WITH_GRADIENT}"] = ours(cute_flash.attn, inputs, bias=leaf)
    return calls


# ---- the summary
# -------------------------------------------------------------------------------------------------------


SUMMARY_COLUMNS = ("geometric mean (lowest)", "cells", "fwd", "bwd", "both")


def _row(label: str, cells: Sequence[Record], call: str, base: str) -> tuple[str, ...] | None:
    """One mean for each direction; None if no cell has both calls."""
    texts, counts = [], []
    for direction in (*DIRECTIONS, "both"):
        ratios = [x for x in (ratio(cell, call, direction, base) for cell in cells) if x is not None]
        counts.append(len(ratios))
        texts.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "-")
    if not any(counts):
        return None
    # If the directions differ, some cells failed; the failures are printed after the tables.
    return (label, f"{counts[0]}" if len(set(counts)) == 1 else f"{counts[0]}, {counts[1]}", *texts)


def summary(record: Record) -> Table:
    """Ours over each peer with the same function, with a block mask over without, each bias over plain."""
    of = {kind: [cell for cell in record["cells"] if cell["kind"] == kind] for kind in Settings().kinds}
    biases = dict.fromkeys(call for cell in of["bias"] for call in cell["sides"]["fwd"] if call != PLAIN)
    rows = [
        *(_row(f"functions: {OURS} over {peer}", of["function"], OURS, peer) for peer in PEERS),
        *(
            _row(f"documents: {WITH_BLOCK_MASK} over {base}", of["documents"], WITH_BLOCK_MASK, base)
            for base in (WITHOUT_BLOCK_MASK, *PEERS)
        ),
        *(_row(f"{bias} over {PLAIN}", of["bias"], bias, PLAIN) for bias in biases),
    ]
    return Table("summary", SUMMARY_COLUMNS, tuple(row for row in rows if row is not None))


STUDY = Study(
    name="mods",
    help="score_mod, mask_mod and bias beside FlexAttention and FA4",
    examples=("--functions alibi,causal --peers flex",),
    settings=Settings,
    context=lambda settings: our_peer(kernels=settings.kernels).context(),
    kernels=lambda settings, tools: kernels_of(settings.groups(tools.device)),
    parts=lambda settings, tools: {"unavailable": unavailable(settings), "cells": []},
    steps=lambda settings, tools: [
        Step("cells", title, partial(measure_cells, cells, settings.rounds, settings.ms, tools))
        for title, cells in settings.groups(tools.device).items()
    ],
    tables=lambda record: [*features.tables(record), summary(record)],
    failures=features.failures,
)


# ---- one process for each group of cells (--parallel)
# -------------------------------------------------------------------------------------------------------


PROCESS_LIMIT_S = 600.0


# FlexAttention and FlashAttention-4 compile each function at its first call, for 10 to 30 s. The processes compile at
# the same time and measure one after another (`GpuLock`).
def measure_group(settings: Settings, lock: Path) -> list[Record]:
    """Measure one group. Runs in a worker process."""
    tools, gpu_lock = Tools(), GpuLock(lock)
    ((_, cells),) = settings.groups(tools.device).items()
    with STUDY.context(settings):
        list(precompile_all(kernels_of(settings.groups(tools.device)), 1))
        records = measure_cells(cells, settings.rounds, settings.ms, tools, gpu_lock)
    # The process waits for the end of the others.
    tools.release()
    return records


def parallel_steps(settings: Settings, pool: Pool, lock: Path) -> list[Step]:
    """A step for each group: it waits for the end of the group's process. All processes begin with the first step."""
    groups = settings.parts()
    outcomes = pool.run([Task(measure_group, (one, lock)) for one in groups.values()])
    ended: dict[int, Outcome] = {}

    def wait(index: int, title: str) -> list[Record]:
        while index not in ended:
            outcome = next(outcomes)
            ended[outcome.index] = outcome
        if error := ended[index].error:
            raise ValueError(f"--parallel: {title}: {error}")
        return ended[index].value

    return [Step("cells", title, partial(wait, i, title)) for i, title in enumerate(groups)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    STUDY.add_arguments(parser)
    parser.add_argument("--parallel", action="store_true", help="compile in a process for each function and head dim")


def run(args: argparse.Namespace) -> int:
    if not args.parallel:
        return STUDY.run(args)
    # All at once: a process that started later would make the others wait until it has compiled.
    num_groups = len(settings_of(Settings, args).parts())
    with tempfile.TemporaryDirectory() as folder, Pool(num_groups, {}, PROCESS_LIMIT_S) as pool:
        steps = partial(parallel_steps, pool=pool, lock=Path(folder) / "lock")
        return replace(STUDY, kernels=None, steps=lambda settings, tools: steps(settings)).run(args)


COMMAND = replace(STUDY.command, add_arguments=add_arguments, run=run)
