"""Continuous batching of transformers 5 with the functions that `install_as_flash_attn` installs.

transformers uses flash-attn only if a GPU is present. These tests replace its checks, and nothing else, to run on the
CPU. tests/gpu/test_transformers.py runs it unchanged.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_flash
from cute_flash.integrations import flash_attn as adapter
from tests.integrations.small_models import causal_models, common

transformers = pytest.importorskip("transformers", minversion="5")

ROOT = Path(__file__).parents[2]
MODELS = causal_models(common(vocabulary=99, hidden=64, head_dim=16, positions=256), window=7)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [30] * 17]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The functions of flash-attn that transformers calls."""
    from transformers import modeling_flash_attention_utils as utils
    from transformers.generation.continuous_batching import initialization

    before = {name: x for name, x in sys.modules.items() if name.partition(".")[0] == "flash_attn"}
    cute_flash.install_as_flash_attn(replace=True)
    result: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(adapter, name)

        # transformers passes the keywords that are in the signature.
        def call(*args: Any, **keywords: Any) -> Any:
            result.append(name)
            return function(*args, **keywords)

        call.__wrapped__ = function  # type: ignore[attr-defined]
        return call

    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        monkeypatch.setattr(sys.modules["flash_attn"], name, counted(name))
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setitem(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check", lambda: True)
    monkeypatch.setattr(transformers.PreTrainedModel, "_flash_attn_can_dispatch", lambda self, **keywords: True)
    monkeypatch.setattr(initialization, "is_torch_xpu_available", lambda: True)
    yield result
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.slow
# transformers uses no block table for sliding windows.
@pytest.mark.parametrize(
    "name, has_block_table", [("llama", False), ("llama", True), ("mistral", False), ("gemma2", False)]
)
def test_same_tokens_as_generate(name: str, has_block_table: bool, calls: list[str]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    config = transformers.GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=98, pad_token_id=0)
    expected = []
    for prompt in PROMPTS:
        tokens = model.generate(torch.tensor([prompt]), generation_config=config, attention_mask=None)
        expected.append(tokens[0, len(prompt) :].tolist())
    model.set_attn_implementation("flash_attention_2")
    batching = transformers.ContinuousBatchingConfig(
        page_size=16, num_blocks=64, max_blocks_per_request=8 if has_block_table else 0
    )
    results = model.generate_batch(inputs=PROMPTS, generation_config=config, continuous_batching_config=batching)
    assert [x.generated_tokens for x in results.values()] == expected
    assert set(calls) == {"flash_attn_varlen_func", *(["flash_attn_with_kvcache"] if has_block_table else [])}


@pytest.mark.processes
def test_metadata_makes_flash_attn_available() -> None:
    code = """
import importlib.metadata, cute_flash
cute_flash.install_as_flash_attn(metadata=True)
assert importlib.metadata.version("flash-attn") == importlib.metadata.version("flash_attn") == "2.8.4"
from transformers.utils import import_utils
import_utils.is_torch_cuda_available = lambda: True
assert import_utils.is_flash_attn_2_available()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
