"""Docstrings of public names: every parameter is documented, and the examples run on the CPU."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import cute_flash
from cute_flash import BlockMask, distributed, masks


def public() -> Iterator[tuple[str, Any]]:
    for name in cute_flash.__all__:
        if name not in ("__version__", "masks"):
            yield name, getattr(cute_flash, name)
    for name in masks.__all__:
        yield f"masks.{name}", getattr(masks, name)
    for name in distributed.__all__:
        yield f"distributed.{name}", getattr(distributed, name)
    yield "BlockMask.of", BlockMask.of
    yield "BlockMask.of_status", BlockMask.of_status


PUBLIC = dict(public())
FUNCTIONS = {name: x for name, x in PUBLIC.items() if inspect.isfunction(x)}


def documented(text: str, section: str) -> list[str]:
    """The names that a section of a Google-style docstring documents."""
    body = re.search(rf"^{section}:\n((?: {{4}}.*\n?|\n)*)", text, re.MULTILINE)
    return re.findall(r"^ {4}\*{0,2}(\w+):", body[1], re.MULTILINE) if body else []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_documented(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert documented(text, "Args") == list(inspect.signature(PUBLIC[name]).parameters)
    assert "\nReturns:\n" in text or name in ("use_checks", "use_jit", "use_kernels", "install_as_flash_attn")


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name: str) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name)
    examples = sum(len(test.examples) for test in tests)
    assert examples or name == "BlockMask.of_status" or name == "BlockMask.of"
    for test in tests:
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
