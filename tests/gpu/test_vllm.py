"""The backend of vLLM on a GPU, in the stub of vLLM's engine: bf16 batches, FP8 caches, CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu.captured import Captured
from tests.integrations.test_vllm import LENGTHS, finish
from tests.integrations.vllm_stub import Engine, installed

pytestmark = pytest.mark.gpu


def layers(name: str) -> list[dict[str, Any]]:
    sinks = torch.tensor([1.0, -1.0, 0.5, 3.0], device="cuda")
    return {
        "plain": [{}],
        "features": [dict(sliding_window=9, logits_soft_cap=20.0, sinks=sinks)],
        "fp8": [dict(kv_cache_dtype="fp8", scales=(0.02, 0.03))],
    }[name]


@pytest.fixture
def backend() -> Iterator[Any]:
    with installed() as backend:
        yield backend


@pytest.mark.parametrize("physical", ["nhd", "hnd"])
@pytest.mark.parametrize("name", ["plain", "features", "fp8"])
def test_mixed_batches(backend: Any, name: str, physical: str) -> None:
    engine = Engine(backend, layers(name), LENGTHS, physical=physical, dtype=torch.bfloat16, device="cuda")
    finish(engine, 64)
    engine.check(1e-1 if name == "fp8" else 5e-2)


@pytest.mark.parametrize("name", ["plain", "features", "fp8"])
def test_a_graph_serves_later_batches(backend: Any, name: str) -> None:
    """One captured graph computes prefill, mixed and decode batches, with padding, as eager calls do."""
    engine = Engine(backend, layers(name), [30, 9, 12], dtype=torch.bfloat16, device="cuda")
    layer = engine.layers[0]
    scales = SimpleNamespace(_k_scale=layer.scales[0], _v_scale=layer.scales[1])
    buffers, _ = engine.common([(0, 20), (1, 2), (2, 2)], pad=(1, 0))
    metadata = engine.builder.build_for_cudagraph_capture(buffers)
    q = torch.zeros(24, engine.HEADS, engine.HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    k, v = torch.zeros(2, 24, engine.HEADS_KV, engine.HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    layer.cache.zero_()
    out = torch.empty_like(q)
    captured = Captured.of(lambda: layer.impl.forward(scales, q, k, v, layer.cache, metadata, out))
    for schedule in [[(0, 20), (1, 2), (2, 2)], [(2, 10), (0, 9)], [(0, 1), (1, 1)], [(1, 6)]]:
        num_tokens = sum(count for _, count in schedule)
        common, _ = engine.common(schedule, (4 - len(schedule), 24 - num_tokens))
        for x in (q, k, v):
            x.normal_()
        layer.impl.do_kv_cache_update(scales, k, v, layer.cache, common.slot_mapping)
        expected = torch.empty_like(q)
        layer.impl.forward(scales, q, k, v, layer.cache, engine.builder.build(0, common), expected)
        for field in ("query_start_loc", "seq_lens", "block_table_tensor"):
            getattr(buffers, field).copy_(getattr(common, field))
        out.fill_(torch.nan)
        captured.replay()
        torch.testing.assert_close(out[:num_tokens], expected[:num_tokens], atol=2e-2, rtol=2e-2)
        for i, count in schedule:
            engine.requests[i].computed += count
