"""The examples in the adapters' docstrings run."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from cute_flash.integrations import bert_padding, flash_attn


@pytest.mark.parametrize("module", [flash_attn, bert_padding], ids=lambda module: module.__name__)
def test_examples_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
