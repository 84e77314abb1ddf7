"""`cute-flash precompile`: compile the kernels of given head dims, dtypes, masks and features into the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cute_flash.jit.describe import describe_key
from cute_flash.jit.disk import DiskCache
from cute_flash.jit.kernels import precompile_all
from cute_flash.planning.launch import LaunchKey
from cute_flash.planning.plan import plan_backward, plan_forward
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
# The head dim of q and k, and that of v if it differs.
HeadDims = tuple[int, int | None]
# (heads, queries). With many heads and one query, the plan uses pack_gqa.
SHAPES = ((1, LENGTH), (64, 1))


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """The kernels of `attn` and `attn_varlen` for all combinations of these values."""

    head_dims: tuple[HeadDims, ...]
    dtypes: tuple[str, ...]
    masks: tuple[str, ...]  # of `BANDS`
    passes: tuple[str, ...]  # of "forward" and "backward"
    features: tuple[tuple[str, ...], ...] = ((),)
    batches: tuple[str, ...] = ("dense",)  # of "dense" and "varlen"
    # Of the backward: whether gradients are deterministic, and whether the LSE has a gradient.
    deterministic: tuple[bool, ...] = (False,)
    has_dlse: tuple[bool, ...] = (False, True)
    # Of varlen batches: whether the call has `seqused_k`.
    seqused_k: tuple[bool, ...] = (False, True)

    def keys(self, arch: ArchSpec) -> list[LaunchKey]:
        """The kernels, each once; raise `UnsupportedError` if there is none for a combination."""
        keys: dict[LaunchKey, None] = {}
        for name in self.passes:
            for problem in self._problems():
                keys |= dict.fromkeys(
                    self._forward_keys(problem, arch) if name == "forward" else self._backward_keys(problem, arch)
                )
        return list(keys)

    def _problems(self) -> Iterator[Problem]:
        for (head_dim, head_dim_v), dtype, mask, features, batch in itertools.product(
            self.head_dims, self.dtypes, self.masks, self.features, self.batches
        ):
            varlen = batch == "varlen"
            for band, seqused_k in itertools.product(BANDS[mask], self.seqused_k if varlen else (False,)):
                yield Problem(
                    1, 1, 1, LENGTH, LENGTH, head_dim, dtype, band, head_dim_v,
                    features=features, varlen=varlen, seqused_k=seqused_k,
                )  # fmt: skip

    def _forward_keys(self, problem: Problem, arch: ArchSpec) -> Iterator[LaunchKey]:
        for seqlen_k, (heads, seqlen_q) in itertools.product(LENGTHS, SHAPES):
            sized = replace(problem, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
            yield from plan_forward(sized, arch, requested_family(), can_pack_gqa=True).host_calls

    def _backward_keys(self, problem: Problem, arch: ArchSpec) -> Iterator[LaunchKey]:
        for seqlen_k, deterministic, has_dlse in itertools.product(LENGTHS, self.deterministic, self.has_dlse):
            sized = replace(problem, seqlen_k=seqlen_k)
            yield from plan_backward(sized, arch, deterministic, has_dlse, requested_family()).host_calls


def precompile_keys(keys: Sequence[LaunchKey], jobs: int, cache: DiskCache | None = None) -> int:
    """Compile kernels in `jobs` processes, with progress on stderr; return how many were missing.

    `cache`: where they are stored, instead of the user's cache.
    """
    num_compiled = 0
    with steps("compiling", len(keys)) as done:
        for key, is_new in zip(keys, precompile_all(keys, jobs, cache)):
            num_compiled += is_new
            done(f"{describe_key(key)}: {'compiled' if is_new else 'already there'}")
    return num_compiled
