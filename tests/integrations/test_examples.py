"""The examples in the adapters' docstrings run."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest
import torch

from cute_flash.integrations import bert_padding, flash_attn, sdpa

MODULES = [flash_attn, bert_padding]
if hasattr(torch.nn.attention, "register_flash_attention_impl"):  # torch 2.10
    MODULES.append(sdpa)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
