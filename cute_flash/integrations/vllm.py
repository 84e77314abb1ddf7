"""The attention backend CUTE_FLASH of vLLM, on top of `attn_decode` and `attn_varlen`. docs/integrations/vllm.md.

vLLM imports this module by the name that `vllm_plugin.register` gives it. In each step, vLLM calls
`MetadataBuilder.build` once, and in each layer `Impl.do_kv_cache_update`, then `Impl.forward`.

`attn_decode` computes prefill, chunked prefill and decode in one call, because it takes any number of tokens per
request. Requests that have no key in the cache yet use `attn_varlen` on the layer's own keys and values, which is
faster for many queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm._custom_ops import reshape_and_cache_flash
from vllm.config import CUDAGraphMode
from vllm.v1.attention import backend as base

from cute_flash.api import attn_varlen
from cute_flash.decode import attn_decode
from cute_flash.errors import UnsupportedError
from cute_flash.integrations.vllm_plugin import NAME
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM

FP8 = ("fp8", "fp8_e4m3")
# First chunks of prompts use `attn_varlen` if they have at least this many tokens on average.
MIN_PREFILL_TOKENS = 32


class Backend(base.AttentionBackend):
    """The attention backend of vLLM. vLLM raises for configurations that the properties below exclude."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % HEAD_DIM_STEP == 0 and MIN_HEAD_DIM <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    supports_sliding_window = supports_per_head_quant_scales = supports_sink

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return f"sm_{capability.major}{capability.minor}" in ARCHS

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **keywords: Any
    ) -> str | None:
        if kv_cache_dtype in FP8 and head_size % 16:
            return f"head_size={head_size} with an FP8 cache: it must be a multiple of 16"
        return None


@dataclass
class Metadata(base.AttentionMetadata):
    """A batch, for all layers of a K/V cache group.

    The tensors are views of vLLM's persistent buffers, so a replayed CUDA graph reads their current values. Requests
    from `num_cached` on are first chunks of prompts, and have no key in the cache yet.
    """

    num_tokens: int
    query_start_loc: Tensor  # (requests + 1), int32
    seq_lens: Tensor  # (requests), int32, with the tokens of this batch
    block_table: Tensor  # (requests, pages), int32
    num_cached: int
    num_cached_tokens: int
    prefill_start_loc: Tensor | None = None  # offsets of the requests from `num_cached` on; None: there are none


class MetadataBuilder(base.AttentionMetadataBuilder[Metadata]):
    """Builds `Metadata` from vLLM's description of a batch. It reads no tensor of the GPU."""

    # `attn_decode` reads lengths, offsets and tables on the GPU, so one graph serves all batches of its size.
    _cudagraph_support: ClassVar[base.AttentionCGSupport] = base.AttentionCGSupport.ALWAYS
    # vLLM puts requests without cached keys last.
    reorder_batch_threshold: int | None = 1
    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # In FULL mode, a graph captured with `build_for_cudagraph_capture` serves all batches. The warm-up before the
        # capture calls `build`, and must run the same kernels, so `build` does not separate prefill either.
        self.separates_prefill = vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.FULL

    def build(
        self, common_prefix_len: int, common_attn_metadata: base.CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        metadata = self.build_for_cudagraph_capture(common_attn_metadata)
        num_cached, start = _num_cached(common_attn_metadata)
        if not self.separates_prefill or num_cached == common_attn_metadata.num_reqs:
            return metadata
        offsets = metadata.query_start_loc[num_cached:] - start
        return replace(metadata, num_cached=num_cached, num_cached_tokens=start, prefill_start_loc=offsets)

    def build_for_cudagraph_capture(self, common_attn_metadata: base.CommonAttentionMetadata) -> Metadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError(
                f"causal={common.causal} of vLLM's batch: {NAME} computes causal attention only; use another backend"
            )
        if common.mm_req_doc_ranges is not None or common.rswa_prefix_lens is not None:
            raise UnsupportedError(
                f"mm_req_doc_ranges and rswa_prefix_lens: {NAME} has no prefix masks; use another backend"
            )
        return Metadata(
            num_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            num_cached=common.num_reqs,
            num_cached_tokens=common.num_actual_tokens,
        )

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        return replace(metadata, block_table=blk_table)

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Nothing to update: the tensors of the metadata are vLLM's own."""


def _num_cached(common: base.CommonAttentionMetadata) -> tuple[int, int]:
    """The number of requests for `attn_decode`, and of their tokens. Later requests have no key in the cache."""
    num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
    if common.seq_lens_cpu_upper_bound is None:
        return num_reqs, num_tokens
    starts = common.query_start_loc_cpu[: num_reqs + 1]
    # `seq_lens_cpu_upper_bound` is at least the length. If it equals the number of queries, the request has no key in
    # the cache.
    has_keys = (common.seq_lens_cpu_upper_bound[:num_reqs] != starts.diff()).nonzero()
    num_cached = int(has_keys[-1]) + 1 if len(has_keys) else 0
    start, end = int(starts[num_cached]), int(starts[-1])
    if end - start < max(1, MIN_PREFILL_TOKENS * (num_reqs - num_cached)):
        return num_reqs, num_tokens
    return num_cached, start


class Impl(base.AttentionImpl[Metadata]):
    """The attention of one layer."""

    supports_dcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = base.AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != base.AttentionType.DECODER:
            raise UnsupportedError(
                f"attn_type={attn_type!r}: {NAME} computes decoder attention only; use another backend"
            )
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"sinks has shape {tuple(sinks.shape)}: expected ({num_heads},)")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.keywords: dict[str, Any] = dict(
            causal=True,
            scale=self.scale,
            window=(None if sliding_window is None else sliding_window - 1, None),
            softcap=logits_soft_cap or None,
            alibi=None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
            sinks=sinks,
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of query (T, H, D) over the cache (pages, Hkv, page_size, 2 D), into `output` (T, H, D)."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale: attention has no quantized output; disable fused output quantization")
        if attn_metadata is None:  # vLLM's memory profiling run
            return output.fill_(0)
        num_cached, num_tokens = attn_metadata.num_cached, attn_metadata.num_tokens
        offsets, start = attn_metadata.prefill_start_loc, attn_metadata.num_cached_tokens
        is_fp8 = self.kv_cache_dtype in FP8
        # Attention must read an FP8 cache, which has rounded keys, and a shared cache, which has another layer's keys.
        if offsets is None or is_fp8 or self.kv_sharing_target_layer_name is not None:
            num_cached, start = len(attn_metadata.seq_lens), num_tokens
        else:
            q, k, v = (x[start:num_tokens] for x in (query, key, value))
            output[start:num_tokens] = attn_varlen(q, k, v, offsets, offsets, **self.keywords)
        if start:
            k_cache, v_cache = self._caches(kv_cache)
            attn_decode(
                query[:start],
                k_cache.view(torch.float8_e4m3fn) if is_fp8 else k_cache,
                v_cache.view(torch.float8_e4m3fn) if is_fp8 else v_cache,
                cache_seqlens=attn_metadata.seq_lens[:num_cached],
                page_table=attn_metadata.block_table[:num_cached],
                cu_seqlens_q=attn_metadata.query_start_loc[: num_cached + 1],
                k_scale=layer._k_scale if is_fp8 else None,
                v_scale=layer._v_scale if is_fp8 else None,
                out=output[:start],
                **self.keywords,
            )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the keys and values of a batch into the cache. Tokens with slot -1 are padding."""
        scales = layer._k_scale, layer._v_scale
        reshape_and_cache_flash(key, value, *self._caches(kv_cache), slot_mapping, self.kv_cache_dtype, *scales)

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views (pages, page_size, Hkv, D) of K and V."""
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return k_cache, v_cache
