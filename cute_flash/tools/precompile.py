"""`cute-flash precompile`: compile the kernels of given head dims, dtypes, masks and features into the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cute_flash.jit.kernels import precompile_all
from cute_flash.planning.launch import LaunchChain, LaunchKey
from cute_flash.planning.merge import MergeStatic
from cute_flash.planning.plan import SchedulerTile, plan_backward, plan_forward
from cute_flash.planning.tiles.bwd_sm80 import SM80_BWD
from cute_flash.planning.tiles.fwd_sm80 import SM80_FWD
from cute_flash.planning.tiles.fwd_sm90 import SM90_FWD
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import NARROW, Band
from cute_flash.spec.family import requested_family
from cute_flash.spec.problem import Problem
from cute_flash.tools.progress import steps

# Kernels are compiled with or without a bound or a chunk. Its size is not compiled in, but may select another tile.
BANDS = {
    "full": (Band(),),
    "causal": (Band(None, 0),),
    "window": (Band(0, 0), Band(NARROW, 0)),
    "left": (Band(0, None),),
    "chunk": (Band(None, None, NARROW), Band(None, None, NARROW + 1)),
}
# Long enough to select the tile of long sequences. Lengths are not compiled in.
LENGTH = 1 << 16
# Short sequences may use another tile.
ROWS = (*SM90_FWD, *(row for table in (SM80_FWD, SM80_BWD) for rows in table.values() for row in rows))
LENGTHS = (LENGTH, *sorted({row.max_keys for row in ROWS if row.max_keys}))
# (heads, queries). With many heads and one query, the plan uses pack_gqa.
SHAPES = ((1, LENGTH), (64, 1))


def kernel_keys(
    arch: ArchSpec,
    head_dims: Iterable[int],
    dtypes: Iterable[str],
    masks: Iterable[str],
    passes: Iterable[str],
    feature_sets: Iterable[tuple[str, ...]],
    batches: Iterable[str],
    deterministic: bool,
) -> list[LaunchKey]:
    """The kernels of all combinations, each once; raise `UnsupportedError` if there is none for one of them."""
    problems = [
        Problem(1, 1, 1, LENGTH, LENGTH, head_dim, dtype, band, features=features, varlen=batch == "varlen")
        for head_dim, dtype, mask, features, batch in itertools.product(head_dims, dtypes, masks, feature_sets, batches)
        for band in BANDS[mask]
    ]
    keys: dict[LaunchKey, None] = {}
    for name in passes:
        for problem in problems:
            keys |= dict.fromkeys(
                _forward_keys(problem, arch) if name == "forward" else _backward_keys(problem, arch, deterministic)
            )
    return list(keys)


def _forward_keys(problem: Problem, arch: ArchSpec) -> Iterator[LaunchKey]:
    for seqlen_k, (heads, seqlen_q), seqused_k in itertools.product(LENGTHS, SHAPES, _seqused_k(problem)):
        sized = replace(problem, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, seqused_k=seqused_k)
        yield from plan_forward(sized, arch, requested_family(), can_pack_gqa=True).host_calls


def _backward_keys(problem: Problem, arch: ArchSpec, deterministic: bool) -> Iterator[LaunchKey]:
    """The backward kernels without and with a gradient of the LSE; if `deterministic`, also the deterministic ones."""
    policies = (False, True) if deterministic else (False,)
    for seqlen_k, is_deterministic, has_dlse, seqused_k in itertools.product(
        LENGTHS, policies, (False, True), _seqused_k(problem)
    ):
        sized = replace(problem, seqlen_k=seqlen_k, seqused_k=seqused_k)
        yield from plan_backward(sized, arch, is_deterministic, has_dlse, requested_family()).host_calls


def _seqused_k(problem: Problem) -> tuple[bool, ...]:
    return (False, True) if problem.varlen else (False,)


def precompile_keys(keys: Sequence[LaunchKey], jobs: int) -> int:
    """Compile kernels in `jobs` processes, with progress on stderr; return how many the cache did not have."""
    num_compiled = 0
    with steps("compiling", len(keys)) as done:
        for key, is_new in zip(keys, precompile_all(keys, jobs)):
            num_compiled += is_new
            done(f"{describe_key(key)}: {'compiled' if is_new else 'already there'}")
    return num_compiled


def describe_key(key: LaunchKey) -> str:
    """One line about a kernel: name, head dims, dtype, bounds, features and tile; or about each kernel of a chain."""
    if isinstance(key, LaunchChain):
        return ", then ".join(map(describe_key, key.keys))
    static, tile = key.static, key.tile
    if isinstance(tile, SchedulerTile):
        return f"{key.kernel}{' seqused_k' if static.seqused_k else ''}"
    if isinstance(static, MergeStatic):
        return f"{key.kernel} {static.num_partials} D={static.head_dim} {static.dtype}"
    bounds = [name for name in ("left", "right") if getattr(static, f"has_{name}")]
    flags = [name for name in ("pack_gqa", "has_dlse") if getattr(static, name, False)]
    parts = [key.kernel, f"D={static.widths}", static.dtype, *bounds, *static.tags, *flags]
    return f"{' '.join(parts)} {tile.tile_m}x{tile.tile_n}"
