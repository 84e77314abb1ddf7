"""The kernels of a pack: those of the calls that people make, and few enough for a wheel of at most 20 MB.

An object takes about 26 KB in the wheel, so that five architectures have room for `MAX_KERNELS`. A kernel of several
rows is stored once. What the table leaves out is compiled on its first call.
"""

from __future__ import annotations

import itertools
import platform
from dataclasses import dataclass

from cute_flash.planning.decode import plan_decode
from cute_flash.planning.launch import LaunchKey
from cute_flash.planning.plan import plan_attention
from cute_flash.spec.arch import ARCHS, ArchSpec
from cute_flash.spec.band import Band
from cute_flash.spec.decode import DecodeProblem
from cute_flash.spec.problem import Problem
from cute_flash.tools.precompile import BANDS, LENGTH, HeadDims, KernelSet

# Architectures that one kind of host CPU does not have: GB10 is sm_121 with Arm cores. Arm servers with A10, L40S or
# RTX cards are rare.
NOT_ON_HOST = {"x86_64": ("sm_121",), "aarch64": ("sm_86", "sm_89", "sm_120")}
BF16, FP16, FP8 = "bfloat16", "float16", "float8_e4m3fn"
D64, D96, D128, D192, D256 = ((width, None) for width in (64, 96, 128, 192, 256))
MLA: HeadDims = (192, 128)  # the prefill of multi-head latent attention
LATENT: HeadDims = (576, 512)  # its decoding
FORWARD, BACKWARD = ("forward",), ("backward",)
BOTH = (*FORWARD, *BACKWARD)
FULL_CAUSAL = ("full", "causal")
# Query heads of a K/V head.
GROUP = 8
# Those of a latent cache: for tiles with up to 16 rows, for those with more, and for clusters of two CTAs.
LATENT_GROUPS = (16, 64, 128)
# The most kernels of five architectures.
MAX_KERNELS = 760


@dataclass(frozen=True, kw_only=True)
class FewQueriesSet:
    """The kernels of `attn` with few queries over many keys."""

    head_dims: tuple[HeadDims, ...]
    dtypes: tuple[str, ...]
    masks: tuple[str, ...]
    queries: tuple[int, ...] = (1,)

    def keys(self, arch: ArchSpec) -> list[LaunchKey]:
        problems = (
            Problem(batch, GROUP, 1, queries, LENGTH, head_dim, dtype, band, head_dim_v)
            for (head_dim, head_dim_v), dtype, mask, queries, batch in itertools.product(
                self.head_dims, self.dtypes, self.masks, self.queries, _batches(arch)
            )
            for band in BANDS[mask]
        )
        return list(dict.fromkeys(key for problem in problems for key in plan_attention(problem, arch).host_calls))


@dataclass(frozen=True, kw_only=True)
class DecodeSet:
    """The kernels of `attn_decode` for all combinations of these values."""

    head_dims: tuple[HeadDims, ...]
    dtypes: tuple[str, ...]
    bands: tuple[Band, ...] = (Band(None, 0),)
    cache_dtypes: tuple[str, ...] = ("",)  # "": that of q
    # Sizes of pages; None: contiguous. All multiples of `planning.decode.CHUNK` share a kernel.
    page_sizes: tuple[int | None, ...] = (None, 16)
    appends: tuple[bool, ...] = (False, True)
    features: tuple[tuple[str, ...], ...] = ((),)
    queries: tuple[int, ...] = (1,)
    groups: tuple[int, ...] = (GROUP,)
    is_latent: bool = False  # one cache, whose first columns are the values
    has_query_tables: bool = False  # lists of rows, if a page has one row

    def keys(self, arch: ArchSpec) -> list[LaunchKey]:
        keys: dict[LaunchKey, None] = {}
        for (head_dim, head_dim_v), dtype, band, cache_dtype, page_size, appends, features, queries, group, batch in (
            itertools.product(
                self.head_dims, self.dtypes, self.bands, self.cache_dtypes, self.page_sizes, self.appends,
                self.features, self.queries, self.groups, _batches(arch),
            )
        ):  # fmt: skip
            problem = DecodeProblem(
                batch=batch,
                tokens=queries,
                total_tokens=batch * queries,
                heads=group,
                heads_kv=1,
                head_dim=head_dim,
                head_dim_v=head_dim_v or head_dim,
                dtype=dtype,
                cache_dtype=cache_dtype or dtype,
                page_size=page_size,
                capacity=LENGTH,
                has_new=appends,
                new_tokens=queries if appends else 0,
                rotary_dim=0,
                rotary="",
                rotary_dtype="float32",
                has_leftpad=False,
                has_batch_idx=False,
                is_latent=self.is_latent,
                has_query_tables=self.has_query_tables,
                features=features,
                num_splits=None,
                band=band,
            )
            keys[plan_decode(problem, arch).key] = None
        return list(keys)


def _batches(arch: ArchSpec) -> tuple[int, ...]:
    """Batch sizes that select every kernel: some start early (`MAX_OVERLAP_TILES_PER_SM`), and one serves the rest."""
    return 1, arch.num_sms // 2


TABLE: tuple[KernelSet | FewQueriesSet | DecodeSet, ...] = (
    # Training and prefill.
    KernelSet(
        head_dims=(D64, D96, D128, D192, D256, MLA), dtypes=(BF16,), masks=FULL_CAUSAL, passes=BOTH, has_dlse=(False,)
    ),
    KernelSet(head_dims=(D64, D128), dtypes=(FP16,), masks=FULL_CAUSAL, passes=BOTH, has_dlse=(False,)),
    KernelSet(head_dims=(D96, D256, MLA), dtypes=(FP16,), masks=FULL_CAUSAL, passes=FORWARD),
    KernelSet(head_dims=(D64, D128, D256), dtypes=(BF16,), masks=("window",), passes=BOTH, has_dlse=(False,)),
    # Decoding.
    DecodeSet(head_dims=(D64, D128, D256), dtypes=(BF16,)),
    DecodeSet(head_dims=(D128,), dtypes=(FP16,)),
    DecodeSet(head_dims=(D64, D128), dtypes=(BF16,), cache_dtypes=(FP8,), page_sizes=(16,)),
    FewQueriesSet(head_dims=(D64, D128, D256), dtypes=(BF16,), masks=FULL_CAUSAL),
    # Decoding with one latent cache: pages with and without append, contiguous caches, FP8, and lists of rows.
    DecodeSet(head_dims=(LATENT,), dtypes=(BF16,), groups=LATENT_GROUPS, is_latent=True, page_sizes=(64,)),
    DecodeSet(
        head_dims=(LATENT,), dtypes=(BF16,), groups=LATENT_GROUPS, is_latent=True, page_sizes=(None,), appends=(False,)
    ),
    DecodeSet(
        head_dims=(LATENT,),
        dtypes=(BF16,),
        groups=LATENT_GROUPS,
        is_latent=True,
        cache_dtypes=(FP8,),
        page_sizes=(64,),
        appends=(False,),
    ),
    DecodeSet(
        head_dims=(LATENT,),
        dtypes=(BF16,),
        groups=LATENT_GROUPS,
        is_latent=True,
        page_sizes=(1,),
        appends=(False,),
        has_query_tables=True,
    ),
    # Batches of sequences of different lengths.
    KernelSet(
        head_dims=(D64, D96, D128, D256, MLA),
        dtypes=(BF16,),
        masks=FULL_CAUSAL,
        passes=FORWARD,
        batches=("varlen",),
        seqused_k=(False,),
    ),
    KernelSet(
        head_dims=(D64, D128),
        dtypes=(FP16,),
        masks=FULL_CAUSAL,
        passes=FORWARD,
        batches=("varlen",),
        seqused_k=(False,),
    ),
    KernelSet(
        head_dims=(D64, D128),
        dtypes=(BF16,),
        masks=FULL_CAUSAL,
        passes=BACKWARD,
        batches=("varlen",),
        has_dlse=(False,),
        seqused_k=(False,),
    ),
    KernelSet(
        head_dims=(D64, D128),
        dtypes=(BF16,),
        masks=("window",),
        passes=FORWARD,
        batches=("varlen",),
        seqused_k=(False,),
    ),
    # Deterministic gradients.
    KernelSet(
        head_dims=(D64, D128),
        dtypes=(BF16,),
        masks=FULL_CAUSAL,
        passes=BACKWARD,
        deterministic=(True,),
        has_dlse=(False,),
    ),
    # Score features, each alone: with the head dims and masks of the models that have them.
    KernelSet(
        head_dims=(D128, D256),
        dtypes=(BF16,),
        masks=("causal", "window"),
        passes=BOTH,
        features=(("softcap",),),
        has_dlse=(False,),
    ),
    KernelSet(
        head_dims=(D64, D128), dtypes=(BF16,), masks=("causal",), passes=BOTH, features=(("alibi",),), has_dlse=(False,)
    ),
    KernelSet(
        head_dims=(D64,),
        dtypes=(BF16,),
        masks=("causal", "window"),
        passes=BOTH,
        features=(("sinks",),),
        has_dlse=(False,),
    ),
    KernelSet(
        head_dims=(D64, D128),
        dtypes=(BF16,),
        masks=FULL_CAUSAL,
        passes=BOTH,
        features=(("dropout",),),
        has_dlse=(False,),
    ),
    DecodeSet(
        head_dims=(D64,),
        dtypes=(BF16,),
        bands=(Band(None, 0), Band(LENGTH, 0)),
        features=(("sinks",),),
        page_sizes=(16,),
        appends=(False,),
    ),
)


def pack_keys(arch: ArchSpec) -> list[LaunchKey]:
    """The kernels of `TABLE` for an architecture, each once."""
    return list(dict.fromkeys(key for row in TABLE for key in row.keys(arch)))


def host_archs() -> list[str]:
    """The architectures of a pack for this host CPU."""
    return [name for name in ARCHS if name not in NOT_ON_HOST.get(platform.machine(), ())]
