"""Runs the Python blocks of a page in order, in one namespace, as a reader types them."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import blocks, name

# On the CPU, integers of at least LARGE in the code, which are sizes for a GPU, are divided by DIVISOR.
LARGE, DIVISOR = 512, 64


def on_cpu(code: str) -> str:
    """The code of an example for CUDA, for the CPU and with smaller sizes. Other code stays the same."""
    if '"cuda"' not in code or "is_available" in code:
        return code
    code = code.replace('"cuda"', '"cpu"')
    return re.sub(r"\b\d+\b(?!\.)", lambda m: str(int(m[0]) // DIVISOR) if int(m[0]) >= LARGE else m[0], code)


def missing_modules(code: str) -> list[str]:
    """Modules of other projects that the code imports and that are not installed."""
    names: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return [module for module in names if importlib.util.find_spec(module.partition(".")[0]) is None]


def python_blocks(page: Path) -> list[str]:
    return [block.code for block in blocks(page) if block.language == "python"]


def run(page: Path, device: str) -> None:
    """Run all blocks, and compare the output of each with the text block after it."""
    torch.manual_seed(0)
    known: dict[str, Any] = {"__name__": "example"}
    parts = blocks(page)
    for i, (language, code) in enumerate(parts):
        if language != "python":
            continue
        if missing := missing_modules(code):
            pytest.skip(f"{', '.join(missing)} is not installed")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code if device == "cuda" else on_cpu(code), f"{name(page)}, block {i}", "exec"), known)
        if printed.getvalue() and i + 1 < len(parts) and parts[i + 1].language == "text":
            assert printed.getvalue().rstrip() == parts[i + 1].code.rstrip()
