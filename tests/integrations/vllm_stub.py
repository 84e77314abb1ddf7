"""A stub of vLLM 0.32 (the classes, fields and signatures that an attention backend uses), and of its engine.

`installed()` puts the stub into `sys.modules`. `Engine` runs a small model with a paged K/V cache through a backend, in
the order of vLLM: `build` once a step, then `do_kv_cache_update` and `forward` in each layer.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tests.integrations.plain import plain

M = TypeVar("M")


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class CUDAGraphMode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    seq_lens_cpu_upper_bound: Tensor | None = None
    mm_req_doc_ranges: dict | None = None
    rswa_prefix_lens: Tensor | None = None


class AttentionBackend(ABC):
    supported_dtypes = [torch.float16, torch.bfloat16]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # noqa: RUF012
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...
    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...
    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
        device_capability,
    ) -> str | None:  # fmt: skip
        return None

    @classmethod
    def _off(cls) -> bool:
        return False

    supports_sink = supports_sliding_window = supports_per_head_quant_scales = supports_non_causal = _off
    supports_batch_invariance = supports_mm_prefix = supports_alibi_sqrt = supports_rswa = is_mla = is_sparse = _off

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return True


class AttentionMetadataBuilder(ABC, Generic[M]):
    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    supports_update_block_table = False
    supports_draft_decode_metadata_update = False

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec, layer_names, vllm_config, device,
        )  # fmt: skip

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> M: ...


class AttentionImpl(ABC, Generic[M]):
    supports_quant_query_input = False
    supports_dcp = False

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> Tensor: ...


class AttentionBackendEnum(Enum):
    """Members are added as in vLLM, where a name can be registered once."""

    CUSTOM = None

    @classmethod
    def register(cls, name: str, value: str) -> AttentionBackendEnum:
        if name in cls._member_map_:
            raise ValueError(f"{name} is registered")
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        cls._member_map_[name] = member
        return member

    def get_class(self) -> type:
        module, _, name = self.value.rpartition(".")
        return getattr(importlib.import_module(module), name)


def register_backend(backend: str, class_path: str) -> None:
    AttentionBackendEnum.register(backend, class_path)


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale) -> None:
    """Caches are (pages, page_size, Hkv, D), of uint8 if they hold FP8. Slot -1: no token."""
    assert len(slot_mapping) <= len(key) and slot_mapping.dtype == torch.int64
    is_token = slot_mapping >= 0
    pages, rows = slot_mapping[is_token] // key_cache.shape[1], slot_mapping[is_token] % key_cache.shape[1]
    for x, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        x = x[: len(slot_mapping)][is_token]
        if kv_cache_dtype.startswith("fp8"):
            x = fp8(x, scale).view(torch.uint8)
        cache[pages, rows] = x


def fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale.reshape(-1, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)


MODULES = {
    "vllm._custom_ops": (reshape_and_cache_flash,),
    "vllm.config": (CUDAGraphMode,),
    "vllm.v1": (),
    "vllm.v1.attention": (),
    "vllm.v1.attention.backends": (),
    "vllm.v1.attention.backends.registry": (AttentionBackendEnum, register_backend),
    "vllm.v1.attention.backend": (
        AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder, AttentionType,
        CommonAttentionMetadata,
    ),
}  # fmt: skip


@contextmanager
def installed() -> Iterator[type]:
    """Install the stub, register the backend as the plugin does, and give the class that vLLM finds by its name."""
    ours = "cute_flash.integrations.vllm"
    before = {name: x for name, x in sys.modules.items() if name.partition(".")[0] == "vllm" or name == ours}
    for name in before:
        del sys.modules[name]
    modules = {"vllm": ModuleType("vllm")}
    for name, members in MODULES.items():
        modules[name] = ModuleType(name)
        for member in members:
            setattr(modules[name], member.__name__, member)
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, modules[name])
    sys.modules.update(modules)
    try:
        from cute_flash.integrations.vllm_plugin import register

        register()
        register()  # vLLM may load plugins more than once
        yield AttentionBackendEnum._member_map_["CUTE_FLASH"].get_class()
    finally:
        AttentionBackendEnum._member_map_.pop("CUTE_FLASH", None)
        for name in [*modules, ours]:
            sys.modules.pop(name, None)
        sys.modules.update(before)


# ---- the engine


@dataclass
class Request:
    tokens: Tensor
    table: Tensor  # pages
    computed: int = 0
    outputs: list[Tensor] = field(default_factory=list)


@dataclass
class Layer:
    keywords: dict[str, Any]
    weights: list[Tensor]  # of q, k, v and the output
    scales: tuple[Tensor, Tensor]
    cache: Tensor
    impl: Any = None

    @property
    def is_shared(self) -> bool:
        return self.keywords.get("kv_sharing_target_layer_name") is not None


class Engine:
    """A model of attention layers only, x + attention(x): no rotary embedding, no norms, in one dtype."""

    HEADS, HEADS_KV, HEAD_DIM, WIDTH, VOCABULARY, PAGES_PER_REQUEST = 4, 2, 16, 24, 50, 16

    def __init__(
        self,
        backend: Any,
        layers: list[dict[str, Any]],
        lengths: list[int],
        page_size: int = 16,
        physical: str = "nhd",
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.backend, self.device, self.dtype, self.page_size = backend, device, dtype, page_size
        num_pages = len(lengths) * self.PAGES_PER_REQUEST + 3
        tables = torch.randperm(num_pages, generator=self.generator).int()
        self.embedding = self._random(self.VOCABULARY, self.WIDTH)
        self.layers: list[Layer] = []
        for keywords in layers:
            self.layers.append(self._layer(keywords, num_pages, physical))
        self.requests = [
            Request(torch.randint(self.VOCABULARY, (x,), generator=self.generator), table.to(device))
            for x, table in zip(lengths, tables.split(self.PAGES_PER_REQUEST))
        ]
        config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
        names = [str(i) for i in range(len(layers))]
        self.builder = backend.get_builder_cls()(SimpleNamespace(block_size=page_size), names, config, device)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def _layer(self, keywords: dict[str, Any], num_pages: int, physical: str) -> Layer:
        width = self.HEADS * self.HEAD_DIM, self.HEADS_KV * self.HEAD_DIM
        weights = [self._random(self.WIDTH, x) / self.WIDTH**0.5 for x in (width[0], width[1], width[1])]
        weights.append(self._random(width[0], self.WIDTH) / width[0] ** 0.5)
        is_fp8 = keywords.get("kv_cache_dtype", "auto").startswith("fp8")
        shape = num_pages, self.HEADS_KV, self.page_size, 2 * self.HEAD_DIM
        if physical == "nhd":
            cache = torch.empty(shape[0], shape[2], shape[1], shape[3], device=self.device, dtype=self.dtype)
            cache = cache.transpose(1, 2)
        else:
            cache = torch.empty(shape, device=self.device, dtype=self.dtype)
        # Rows that were never written must not be read: they hold NaN (0x7f in FP8).
        cache = cache.to(torch.uint8).fill_(0x7F) if is_fp8 else cache.fill_(torch.nan)
        keywords = dict(keywords)
        scales = keywords.pop("scales", (1.0, 1.0))
        layer = Layer(keywords, weights, tuple(torch.tensor(x, device=self.device) for x in scales), cache)  # type: ignore[arg-type]
        if layer.is_shared:
            target = self.layers[int(keywords["kv_sharing_target_layer_name"])]
            layer.cache = target.cache
            layer.scales = target.scales
        layer.impl = self.backend.get_impl_cls()(
            self.HEADS, self.HEAD_DIM, 0.3, self.HEADS_KV, keywords.get("alibi_slopes"),
            keywords.get("sliding_window"), keywords.get("kv_cache_dtype", "auto"), keywords.get("logits_soft_cap"),
            "decoder", keywords.get("kv_sharing_target_layer_name"),
            **({"sinks": keywords["sinks"]} if "sinks" in keywords else {}),
        )  # fmt: skip
        return layer

    def common(self, schedule: list[tuple[int, int]], pad: tuple[int, int] = (0, 0)) -> tuple[Any, Tensor]:
        """vLLM's description of a batch of (request, tokens), with padding (requests, tokens); and its token ids."""
        requests = [self.requests[i] for i, _ in schedule]
        counts = [count for _, count in schedule]
        ends = [x.computed + count for x, count in zip(requests, counts)]
        ids = [x.tokens[x.computed : end] for x, end in zip(requests, ends)]
        slots = []
        for x, end in zip(requests, ends):
            positions = torch.arange(x.computed, end, device=self.device)
            slots.append(x.table[positions // self.page_size].long() * self.page_size + positions % self.page_size)
        starts = torch.tensor([0, *counts, *[0] * pad[0]]).cumsum(0).int()
        lengths = torch.tensor([*ends, *[0] * pad[0]], dtype=torch.int32)
        tables = torch.stack([*(x.table for x in requests), *[torch.zeros_like(requests[0].table)] * pad[0]])
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self.device),
            num_reqs=len(lengths),
            num_actual_tokens=sum(counts) + pad[1],
            max_query_len=max(counts),
            max_seq_len=max(ends),
            block_table_tensor=tables,
            slot_mapping=torch.cat([*slots, torch.full((pad[1],), -1, device=self.device)]),
            seq_lens_cpu_upper_bound=lengths,
        )
        return common, torch.cat([*ids, torch.zeros(pad[1], dtype=torch.long)])

    @torch.inference_mode()
    def run(self, metadata: Any, ids: Tensor, slots: Tensor) -> Tensor:
        """All layers on one batch. Returns the hidden states of its tokens."""
        x = self.embedding[ids.to(self.device)]
        for layer in self.layers:
            q, k, v = ((x @ w).unflatten(-1, (-1, self.HEAD_DIM)) for w in layer.weights[:3])
            scales = SimpleNamespace(_k_scale=layer.scales[0], _v_scale=layer.scales[1])
            if not (self.backend.forward_includes_kv_cache_update or layer.is_shared):
                layer.impl.do_kv_cache_update(scales, k, v, layer.cache, slots)
            out = torch.full_like(q, torch.nan)
            result = layer.impl.forward(scales, q, k, v, layer.cache, metadata, out)
            assert result is out
            x = x + out.flatten(1) @ layer.weights[3]
        return x

    def step(self, schedule: list[tuple[int, int]], pad: tuple[int, int] = (0, 0)) -> None:
        """Compute the next tokens of requests, and keep their hidden states."""
        common, ids = self.common(schedule, pad)
        x = self.run(self.builder.build(0, common), ids, common.slot_mapping)
        self.advance(schedule, x)

    def advance(self, schedule: list[tuple[int, int]], x: Tensor) -> None:
        assert bool(x.isfinite().all())
        for i, count in schedule:
            self.requests[i].outputs.append(x[:count])
            self.requests[i].computed += count
            x = x[count:]

    def expected(self, request: Request) -> Tensor:
        """The hidden states of a request's tokens by dense attention on the whole sequence, in fp64."""
        x = self.embedding[request.tokens.to(self.device)].double().cpu()
        keys: list[tuple[Tensor, Tensor]] = []
        for layer in self.layers:
            q, k, v = ((x @ w.double().cpu()).unflatten(-1, (-1, self.HEAD_DIM)) for w in layer.weights[:3])
            if layer.is_shared:
                k, v = keys[int(layer.keywords["kv_sharing_target_layer_name"])]
            elif layer.cache.dtype == torch.uint8:
                k, v = (
                    fp8(x.to(self.dtype), s).double() * s.double().reshape(-1, 1)
                    for x, s in zip((k, v), (y.cpu() for y in layer.scales))
                )
            keys.append((k, v))
            slopes, sinks = layer.keywords.get("alibi_slopes"), layer.keywords.get("sinks")
            out, _ = plain(
                q, k, v, causal=True, window=((layer.keywords.get("sliding_window") or 0) - 1, -1), scale=0.3,
                softcap=layer.keywords.get("logits_soft_cap") or 0.0,
                slopes=None if slopes is None else torch.tensor(slopes), sinks=None if sinks is None else sinks.cpu(),
            )  # fmt: skip
            x = x + out.flatten(1) @ layer.weights[3].double().cpu()
        return x

    def check(self, tolerance: float) -> None:
        """All tokens of all requests were computed, and match dense attention."""
        for request in self.requests:
            assert request.computed == len(request.tokens)
            result = torch.cat(request.outputs).double().cpu()
            torch.testing.assert_close(result, self.expected(request), atol=tolerance, rtol=tolerance)
