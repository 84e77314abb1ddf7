"""The backend of vLLM in a stub of vLLM's engine: results against dense attention, on the CPU."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_flash import UnsupportedError
from tests.integrations.vllm_stub import AttentionCGSupport, CUDAGraphMode, DeviceCapability, Engine, installed

ROOT = Path(__file__).parents[2]
LAYERS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}, {}],
    "window": [dict(sliding_window=9), {}],
    "softcap": [dict(logits_soft_cap=2.0)],
    "alibi": [dict(alibi_slopes=[0.5, 0.25, 0.125, 0.0625])],
    "sinks": [dict(sinks=torch.tensor([1.0, -1.0, 0.5, 3.0])), dict(sliding_window=5, sinks=torch.zeros(4))],
    "fp8": [dict(kv_cache_dtype="fp8", scales=(0.02, 0.03))],
    "fp8 scales of heads": [dict(kv_cache_dtype="fp8_e4m3", scales=([0.02, 0.01], [0.03, 0.05]))],
    "shared": [{}, dict(kv_sharing_target_layer_name="0")],
}
LENGTHS = [70, 3, 40, 19]


@pytest.fixture
def backend() -> Iterator[Any]:
    with installed() as backend:
        yield backend


@pytest.fixture
def calls(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The functions that layers call, with their numbers of queries."""
    module, result = sys.modules[backend.__module__], []

    def counted(name: str) -> Any:
        function = getattr(module, name)

        def call(q: Any, *args: Any, **keywords: Any) -> Any:
            result.append((name, len(q)))
            return function(q, *args, **keywords)

        return call

    for name in ("attn_decode", "attn_varlen"):
        monkeypatch.setattr(module, name, counted(name))
    return result


def finish(engine: Engine, tokens: int, is_ordered: bool = True, pad: bool = False) -> None:
    """Random batches of at most `tokens` tokens, until all requests are computed."""
    choose = random.Random(0)
    while True:
        open_requests = [i for i, x in enumerate(engine.requests) if x.computed < len(x.tokens)]
        if not open_requests:
            return
        chosen = choose.sample(open_requests, choose.randint(1, len(open_requests)))
        if is_ordered:  # vLLM: requests with keys in the cache first
            chosen.sort(key=lambda i: engine.requests[i].computed == 0)
        schedule = []
        for i in chosen:
            left = len(engine.requests[i].tokens) - engine.requests[i].computed
            schedule.append((i, choose.choice([1, min(left, tokens), choose.randint(1, left)])))
        engine.step(schedule, (choose.randint(0, 3), choose.randint(0, 5)) if pad else (0, 0))


@pytest.mark.parametrize("name", LAYERS)
def test_mixed_batches(backend: Any, name: str) -> None:
    engine = Engine(backend, LAYERS[name], LENGTHS)
    finish(engine, 64)
    # fp8 values next to a rounding boundary may be rounded differently.
    engine.check(2e-2 if "fp8" in name else 1e-5)


@pytest.mark.parametrize("physical", ["nhd", "hnd"])
@pytest.mark.parametrize("page_size", [1, 16, 20])
def test_pages_and_layouts(backend: Any, page_size: int, physical: str) -> None:
    lengths = [min(x, page_size * Engine.PAGES_PER_REQUEST) for x in LENGTHS]
    engine = Engine(backend, LAYERS["window"], lengths, page_size, physical)
    finish(engine, 30)
    engine.check(1e-5)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL])
def test_any_order_and_padding(backend: Any, mode: CUDAGraphMode) -> None:
    """Requests in any order; padding requests without tokens, and padding tokens, as in CUDA graphs."""
    engine = Engine(backend, LAYERS["plain"], LENGTHS, mode=mode)
    finish(engine, 50, is_ordered=False, pad=True)
    engine.check(1e-5)


def test_prefill_chunked_prefill_and_decode(backend: Any, calls: list[tuple[str, int]]) -> None:
    """First chunks use `attn_varlen` on the layer's keys; all others read the cache in one call."""
    engine = Engine(backend, [{}], [70, 40])
    steps = [
        ([(0, 64)], [("attn_varlen", 64)]),  # prefill
        ([(0, 3)], [("attn_decode", 3)]),  # chunked prefill
        ([(0, 1), (1, 35)], [("attn_varlen", 35), ("attn_decode", 1)]),  # decode, and prefill of another request
        ([(0, 1), (1, 4)], [("attn_decode", 5)]),  # decode, and chunked prefill
        ([(0, 1), (1, 1)], [("attn_decode", 2)]),  # decode
    ]
    for schedule, expected in steps:
        calls.clear()
        engine.step(schedule)
        assert calls == expected
    engine.check(1e-5)


@pytest.mark.parametrize("name", ["fp8", "shared"])
def test_keys_of_the_cache_differ_from_those_of_the_layer(
    backend: Any, calls: list[tuple[str, int]], name: str
) -> None:
    """FP8 caches and layers that share a cache read the cache in first chunks too."""
    engine = Engine(backend, LAYERS[name][-1:] if name == "fp8" else LAYERS[name], [40])
    engine.step([(0, 40)])
    assert calls[-1] == ("attn_decode", 40)


def test_short_prompts_and_full_graphs_use_one_call(backend: Any, calls: list[tuple[str, int]]) -> None:
    Engine(backend, [{}], [20, 5]).step([(0, 20), (1, 5)])
    Engine(backend, [{}], [80], mode=CUDAGraphMode.FULL).step([(0, 80)])
    assert calls == [("attn_decode", 25), ("attn_decode", 80)]


def test_captured_metadata_serve_later_batches(backend: Any) -> None:
    """A replayed CUDA graph runs no Python: the metadata of its capture must read vLLM's buffers."""
    engine = Engine(backend, LAYERS["window"], [30, 9, 12])
    buffers, ids = engine.common([(0, 20), (1, 2), (2, 2)], pad=(1, 0))
    metadata = engine.builder.build_for_cudagraph_capture(buffers)
    schedules = [[(0, 20), (1, 2), (2, 2)], [(2, 10), (0, 10)], [(1, 7)]]
    for schedule in schedules:
        num_tokens = sum(count for _, count in schedule)
        common, ids = engine.common(schedule, (4 - len(schedule), 24 - num_tokens))
        for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
            getattr(buffers, name).copy_(getattr(common, name))
        engine.advance(schedule, engine.run(metadata, ids, common.slot_mapping))
    engine.check(1e-5)


def test_block_tables_can_be_replaced(backend: Any) -> None:
    """Another K/V cache group has the same batch and other pages."""
    engine = Engine(backend, [{}], [12])
    common, _ = engine.common([(0, 12)])
    other = common.block_table_tensor.flip(1)
    metadata = engine.builder.update_block_table(engine.builder.build(0, common), other, common.slot_mapping)
    assert metadata.block_table is other and metadata.seq_lens is common.seq_lens


def test_profiling_runs_have_no_metadata(backend: Any) -> None:
    engine = Engine(backend, [{}], [4])
    x = torch.randn(4, 4, 16)
    assert not engine.layers[0].impl.forward(None, x, x, x, torch.empty(0), None, torch.randn(4, 4, 16)).any()


def test_declared_support(backend: Any) -> None:
    assert backend.get_name() == "CUTE_FLASH"
    assert backend.get_builder_cls()._cudagraph_support is AttentionCGSupport.ALWAYS
    assert backend.supported_kv_cache_dtypes == ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    assert backend.supports_sink() and backend.supports_sliding_window() and backend.supports_per_head_quant_scales()
    for name in ("batch_invariance", "non_causal", "mm_prefix", "alibi_sqrt", "rswa"):
        assert not getattr(backend, f"supports_{name}")()
    assert not (backend.is_mla() or backend.is_sparse() or backend.get_impl_cls().supports_dcp)
    assert [x for x in (0, 8, 20, 64, 256, 512, 520) if backend.supports_head_size(x)] == [8, 64, 256, 512]
    capabilities = [(7, 5), (8, 0), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]
    supported = [x for x in capabilities if backend.supports_compute_capability(DeviceCapability(*x))]
    assert supported == [(8, 0), (8, 9), (9, 0), (12, 0), (12, 1)]
    others = dict(
        block_size=None, use_mla=False, has_sink=False, use_sparse=False, use_mm_prefix=False,
        device_capability=DeviceCapability(9, 0),
    )  # fmt: skip
    assert backend.supports_combination(64, torch.bfloat16, "fp8", **others) is None
    assert backend.supports_combination(72, torch.bfloat16, "auto", **others) is None
    assert "head_size=72 with an FP8 cache" in backend.supports_combination(72, torch.bfloat16, "fp8", **others)


def test_refused(backend: Any) -> None:
    impl, x = backend.get_impl_cls(), torch.zeros(2, 4, 16)
    with pytest.raises(UnsupportedError, match="attn_type='encoder_only'"):
        impl(4, 16, 1.0, attn_type="encoder_only")
    with pytest.raises(ValueError, match=re.escape("sinks has shape (3,): expected (4,)")):
        impl(4, 16, 1.0, sinks=torch.zeros(3))
    with pytest.raises(UnsupportedError, match="output_scale"):
        impl(4, 16, 1.0).forward(None, x, x, x, x, None, x, output_scale=torch.ones(()))
    engine = Engine(backend, [{}], [4])
    for name, value in (("causal", False), ("mm_req_doc_ranges", {}), ("rswa_prefix_lens", x)):
        common, _ = engine.common([(0, 4)])
        setattr(common, name, value)
        with pytest.raises(UnsupportedError, match=name):
            engine.builder.build(0, common)


def test_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition('[project.entry-points."vllm.general_plugins"]\n')[2]
    assert section.startswith('cute_flash = "cute_flash.integrations.vllm_plugin:register"\n')
