"""Mods by name: the kinds that torch's documentation of FlexAttention shows, written here, and those of attention-gym.

MODS[name](shape) makes a case. The sizes of images, documents and windows depend on the length, which is a square
number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

Mod = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    length: int
    batch: int
    heads: int
    device: str

    @property
    def side(self) -> int:
        """The side of a square image with one token per pixel."""
        return math.isqrt(self.length)

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device, generator=self._generator())

    def random_ints(self, end: int, *size: int) -> Tensor:
        return torch.randint(0, end, size, dtype=torch.int32, device=self.device, generator=self._generator())

    def ints(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def offsets(self, documents: int = 8) -> Tensor:
        """The first row of each document, and the length."""
        inner = sorted(random.Random(0).sample(range(1, self.length), documents - 1))
        return self.ints([0, *inner, self.length])

    def _generator(self) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(1)


@dataclass(frozen=True)
class Case:
    mask_mod: Mod | None = None
    score_mod: Mod | None = None
    seqlen_q: int | None = None  # the length of the shape by default
    depends_on: str = ""  # "b", "h" or "bh": the indices that the mask uses beside q and k
    learned: tuple[Tensor, ...] = ()  # captured tensors whose gradients are compared


def mask_of(function: Mod, *tensors: Tensor) -> Mod:
    """A mask_mod that captures tensors: the function takes them before the indices."""
    return lambda b, h, q, k: function(*tensors, b, h, q, k)


def score_of(function: Mod, *tensors: Tensor) -> Mod:
    return lambda score, b, h, q, k: function(*tensors, score, b, h, q, k)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 20.0 * torch.tanh(score * 0.05)


def alibi(s: Shape) -> Mod:
    slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / s.heads) for i in range(s.heads)], device=s.device)
    return score_of(lambda slopes, x, b, h, q, k: x - slopes[h] * (q - k).abs(), slopes)


def learned_bias(s: Shape) -> Case:
    table = s.random(2 * s.length).requires_grad_()
    return Case(score_mod=lambda x, b, h, q, k: x + table[s.length + k - q], learned=(table,))


def documents(s: Shape) -> Tensor:
    """The document of each row."""
    return torch.bucketize(torch.arange(s.length, device=s.device), s.offsets()[1:-1], right=True, out_int32=True)


def images(s: Shape) -> Tensor:
    """The image of each row; 0 is text."""
    tenth = torch.arange(s.length, device=s.device) // (s.length // 10)
    return torch.where(tenth % 2 == 1, tenth // 2 + 1, 0).int()


def causal_in_document(s: Shape) -> Mod:
    return mask_of(lambda doc, b, h, q, k: (doc[q] == doc[k]) & (k <= q), documents(s))


MODS: dict[str, Callable[[Shape], Case]] = {
    "identity": lambda s: Case(score_mod=lambda x, b, h, q, k: x),
    "causal": lambda s: Case(causal),
    "causal_score": lambda s: Case(score_mod=lambda x, b, h, q, k: torch.where(k > q, -math.inf, x)),
    "checkerboard": lambda s: Case(score_mod=lambda x, b, h, q, k: torch.where((q + k) % 2 == 0, 2.0 * x, 0.5 * x)),
    "distance": lambda s: Case(score_mod=lambda x, b, h, q, k: x - 0.125 * (q - k).abs()),
    "alibi": lambda s: Case(score_mod=alibi(s)),
    "softcap": lambda s: Case(score_mod=softcap),
    "causal_alibi": lambda s: Case(causal, alibi(s)),
    "causal_softcap": lambda s: Case(causal, softcap),
    "relative_bias": lambda s: Case(
        score_mod=score_of(lambda table, x, b, h, q, k: x + table[s.length + k - q], s.random(2 * s.length))
    ),
    "relative_bias_of_heads": lambda s: Case(
        score_mod=score_of(lambda table, x, b, h, q, k: x + table[h, s.length + k - q], s.random(s.heads, 2 * s.length))
    ),
    "learned_relative_bias": learned_bias,
    "dense_bias": lambda s: Case(
        score_mod=score_of(lambda t, x, b, h, q, k: x + t[h, q, k], s.random(s.heads, s.length, s.length).bfloat16())
    ),
    "document": lambda s: Case(mask_of(lambda doc, b, h, q, k: doc[q] == doc[k], documents(s))),
    "document_causal": lambda s: Case(causal_in_document(s)),
    "document_causal_alibi": lambda s: Case(causal_in_document(s), alibi(s)),
    "document_score": lambda s: Case(
        score_mod=score_of(lambda doc, x, b, h, q, k: torch.where(doc[q] == doc[k], x, -math.inf), documents(s))
    ),
    "sliding_window": lambda s: Case(lambda b, h, q, k: (k <= q) & (k > q - s.length // 4)),
    "symmetric_window": lambda s: Case(lambda b, h, q, k: (k - q <= s.length // 8) & (q - k <= s.length // 8)),
    "windows_of_heads": lambda s: Case(
        mask_of(lambda w, b, h, q, k: (k <= q) & (k > q - w[h]), s.ints(s.length // (i + 2) for i in range(s.heads))),
        depends_on="h",
    ),
    "prefix_lm": lambda s: Case(
        mask_of(lambda n, b, h, q, k: (k <= q) | (k < n[b]), s.ints(s.length // 8 + 37 * i for i in range(s.batch))),
        depends_on="b",
    ),
    "padding": lambda s: Case(
        mask_of(lambda n, b, h, q, k: k < n[b], s.ints(s.length - 100 * i - 3 for i in range(s.batch))), depends_on="b"
    ),
    "causal_with_offset": lambda s: Case(
        mask_of(lambda n, b, h, q, k: k <= q + n, torch.tensor(s.length // 2, device=s.device)), seqlen_q=s.length // 2
    ),
    # Text is causal; the patches of an image attend to all patches of the same image.
    "causal_with_images": lambda s: Case(
        mask_of(lambda image, b, h, q, k: (k <= q) | ((image[q] > 0) & (image[q] == image[k])), images(s))
    ),
}


def gym(name: str, *args: Any, **options: Any) -> Any:
    """The result of a function of attention-gym: "masks.function", "mods.function" or "masks.module.function"."""
    module, _, function = name.rpartition(".")
    return getattr(import_module(f"attn_gym.{module}"), function)(*args, **options)


def gym_mask(name: str, *args: Any) -> Case:
    return Case(gym(f"masks.{name}", *args))


def gym_score(name: str, *args: Any, mask_mod: Mod | None = None, **options: Any) -> Case:
    return Case(mask_mod, gym(f"mods.{name}", *args, **options))


def jetspec_tree(s: Shape) -> Case:
    nodes, rng = s.length // 4, random.Random(3)
    parents = [-1, *(rng.randrange(i) for i in range(1, nodes))]
    ancestors = gym("masks.build_tree_ancestor_matrix", parents, device=s.device)
    return Case(gym("masks.generate_jetspec_tree_causal_mask_mod", s.length - nodes, ancestors), seqlen_q=nodes)


def best_blocks(s: Shape) -> Tensor:
    """For each block of 64 queries, a quarter of the blocks of 64 keys."""
    blocks = s.length // 64
    return s.random(s.batch, s.heads, blocks, blocks).topk(max(2, blocks // 4), dim=-1).indices


def vsa_block_map(s: Shape) -> Case:
    blocks = s.length // 64
    is_needed = torch.zeros(s.batch, s.heads, blocks, blocks, dtype=torch.bool, device=s.device)
    is_needed.scatter_(-1, best_blocks(s), True)
    return Case(gym("masks.vsa.generate_vsa_block_map_mask_mod", is_needed, 64), depends_on="bh")


def graphormer_spatial(s: Shape) -> Case:
    table, distances = s.random(s.heads, 8).requires_grad_(), s.random_ints(6, s.batch, s.length, s.length)
    return Case(score_mod=gym("mods.generate_graphormer_spatial_bias", table, distances), learned=(table,))


def graphormer_edge(s: Shape) -> Case:
    edges, distances = (s.random_ints(6, s.batch, s.length, s.length, *rest) for rest in ((3,), ()))
    return gym_score("generate_graphormer_edge_bias", s.random(s.heads, 3, 6), edges, distances.clamp(max=3))


def mla_rope(s: Shape) -> Case:
    q, k = (s.random(s.batch, heads, s.length, 64) for heads in (s.heads, 1))
    return gym_score("generate_mla_rope_score_mod", q, k, num_heads=s.heads, scale=0.1)


MODS |= {
    "gym_batchify": lambda s: gym_mask("batchify_mask_mod", causal, s.length // 4),
    "gym_block_diffusion": lambda s: gym_mask("generate_block_diffusion_mask", s.length // 2, 32),
    "gym_dilated": lambda s: gym_mask("generate_dilated_sliding_window", s.length // 4, 2),
    "gym_document": lambda s: gym_mask("generate_doc_mask_mod", noop_mask, s.offsets()),
    "gym_document_causal": lambda s: gym_mask("generate_doc_mask_mod", causal, s.offsets()),
    "gym_packed_document": lambda s: gym_mask("generate_packed_causal_doc_mask_mod", s.offsets()),
    "gym_flamingo": lambda s: gym_mask(
        "generate_vision_cross_attention_mask_mod", s.offsets().long().unfold(0, 2, 1).contiguous(), s.length // 8
    ),
    "gym_global_window": lambda s: gym_mask(
        "generate_global_sliding_window", s.length // 8, torch.arange(s.length, device=s.device) % (s.length // 8) == 0
    ),
    "gym_jetspec_tree": jetspec_tree,
    "gym_jetspec_training": lambda s: Case(
        gym("masks.generate_jetspec_training_mask_mod", s.length // 2, 16), seqlen_q=s.length // 2
    ),
    "gym_natten": lambda s: gym_mask("generate_natten", s.side, s.side, 13, 13),
    "gym_tiled_natten": lambda s: gym_mask("generate_tiled_natten", s.side, s.side, 13, 13, 8, 8),
    "gym_morton_natten": lambda s: gym_mask("generate_morton_natten", s.side, s.side, 13, 13),
    "gym_prefix_lm": lambda s: gym_mask("generate_prefix_lm_mask", s.length // 4),
    "gym_shared_prefix": lambda s: gym_mask(
        "generate_shared_prefix_mask_mod", s.offsets(6), s.ints([0, 0, 0, 3, 3, 3]).long()
    ),
    "gym_sliding_window": lambda s: gym_mask("generate_sliding_window", s.length // 4),
    "gym_sta_2d": lambda s: gym_mask("generate_sta_mask_mod_2d", (s.side, s.side), (16, 16), (8, 8)),
    "gym_sta_3d": lambda s: gym_mask("generate_sta_mask_mod_3d", (4, s.side // 2, s.side // 2), (4, 8, 8), (2, 4, 4)),
    "gym_svg_spatial": lambda s: gym_mask(
        "generate_spatial_head_mask_mod", s.length // 8, 7, s.length // 8, 2, True, 128
    ),
    "gym_svg_temporal": lambda s: gym_mask("generate_temporal_head_mask_mod", s.length // 8, 7, s.length // 8, 2),
    "gym_vsa": lambda s: Case(gym("masks.generate_vsa_mask_mod", best_blocks(s), 64), depends_on="bh"),
    "gym_vsa_block_map": vsa_block_map,
    "gym_vsa_padding": lambda s: gym_mask(
        "vsa.generate_vsa_padding_mask_mod", s.ints(64 - 5 * (i % 3) for i in range(s.length // 64)), 64
    ),
    "gym_activation_gelu": lambda s: gym_score("generate_activation_score_mod", F.gelu),
    "gym_activation_relu": lambda s: gym_score("generate_activation_score_mod", F.relu),
    "gym_activation_sigmoid": lambda s: gym_score("generate_activation_score_mod", torch.sigmoid),
    "gym_alibi": lambda s: gym_score("generate_alibi_bias", s.heads),
    "gym_causal_alibi": lambda s: gym_score("generate_alibi_bias", s.heads, mask_mod=causal),
    "gym_softcap": lambda s: gym_score("generate_tanh_softcap", 20),
    "gym_softcap_approx": lambda s: gym_score("generate_tanh_softcap", 20, approx=True),
    "gym_sandwich": lambda s: gym_score("generate_sandwich_bias", s.heads, s.length, device=s.device, mask_mod=causal),
    "gym_graphormer_spatial": graphormer_spatial,
    "gym_graphormer_edge": graphormer_edge,
    "gym_mla_rope": mla_rope,
}

# Mods that cute_flash refuses with a TraceError.
REFUSED = {
    "gym_mla_rope": "a dot product of captured rows of 64 elements; rows have at most 32",
    "gym_softcap_approx": "the score_mod applies an autograd.Function",
}

TIMED = (
    "causal", "sliding_window", "document_causal", "gym_prefix_lm", "alibi", "softcap", "relative_bias", "gym_natten",
    "causal_softcap", "gym_dilated", "causal_alibi", "causal_with_images",
)  # fmt: skip
