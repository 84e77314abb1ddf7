"""The public functions as type checkers and `dir` see them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import cute_flash
from cute_flash.spec.keywords import AttnKeywords, DecodeKeywords, VarlenKeywords

ROOT = Path(__file__).parents[2]
# These keywords decide the type of the result, so overloads name them.
RESULTS = {"return_lse", "return_max_logit"}
REQUIRED = {"cache_seqlens"}

# Mypy accepts every line but those with a comment, which names the error.
SNIPPET = """
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from typing_extensions import assert_type

import cute_flash

x = torch.empty(1)
flag = bool(x)
assert_type(cute_flash.attn(x, x, x), Tensor)
assert_type(cute_flash.attn(x, x, x, causal=True, window=(3, None), bias=x, layout="bshd", return_lse=False), Tensor)
assert_type(cute_flash.attn(x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cute_flash.attn(x, x, x, return_max_logit=True, softcap=3.0), tuple[Tensor, Tensor])
assert_type(cute_flash.attn(x, x, x, return_lse=True, return_max_logit=True), tuple[Tensor, Tensor, Tensor])
assert_type(cute_flash.attn(x, x, x, return_lse=flag), Tensor | tuple[Tensor, ...])
assert_type(cute_flash.attn_varlen(x, x, x, x, x, max_seqlen_q=3), Tensor)
assert_type(cute_flash.attn_varlen(x, x, x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cute_flash.attn_varlen(x, x, x, x, x, return_max_logit=True), tuple[Tensor, Tensor])
both = cute_flash.attn_varlen(x, x, x, x, x, return_lse=True, return_max_logit=True)
assert_type(both, tuple[Tensor, Tensor, Tensor])
assert_type(cute_flash.attn_nested(x, x, x, dropout=0.1), Tensor)
assert_type(cute_flash.attn_nested(x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cute_flash.attn_nested(x, x, x, return_max_logit=True), tuple[Tensor, Tensor])
assert_type(cute_flash.attn_decode(x, x, x, cache_seqlens=3, k_scale=0.5), Tensor)
assert_type(cute_flash.attn_decode(x, x, x, cache_seqlens=x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cute_flash.attn_decode(x, x, x, cache_seqlens=x, return_lse=flag), Tensor | tuple[Tensor, Tensor])
assert_type(cute_flash.flex_attention(x, x, x, None, None, 0.5, enable_gqa=True), Tensor)
assert_type(cute_flash.flex_attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cute_flash.flex_attention(x, x, x, return_aux=AuxRequest(lse=True)), tuple[Tensor, AuxOutput])
assert_type(cute_flash.merge([x], [x]), tuple[Tensor, Tensor])
assert_type(cute_flash.BlockMask.of(cute_flash.masks.causal(), (1, 1, 8, 8)), cute_flash.BlockMask)
cute_flash.attn(x, x, x, causal="yes")  # call-overload
cute_flash.attn(x, x, x, casual=True)  # call-overload
cute_flash.attn_varlen(x, x, x, x, x, layout="bshd")  # call-overload
cute_flash.attn_decode(x, x, x)  # call-overload
cute_flash.attn_decode(x, x, x, cache_seqlens=x, dropout=0.1)  # call-overload
cute_flash.attention  # attr-defined
"""


def test_results_have_their_types(tmp_path: Path) -> None:
    path = tmp_path / "snippet.py"
    path.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = {
        int(x.split(":")[1]): x.rpartition("[")[2].rstrip("]") for x in done.stdout.splitlines() if ": error:" in x
    }
    lines = enumerate(SNIPPET.splitlines(), 1)
    assert found == {i: line.rpartition("# ")[2] for i, line in lines if "  # " in line}, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        (cute_flash.attn, AttnKeywords),
        (cute_flash.attn_varlen, VarlenKeywords),
        (cute_flash.attn_decode, DecodeKeywords),
    ],
)
def test_overloads_have_all_keywords(function, keywords) -> None:  # type: ignore[no-untyped-def]
    parameters = inspect.signature(function).parameters.values()
    named = {x.name: x.annotation for x in parameters if x.kind == x.KEYWORD_ONLY and x.name not in RESULTS | REQUIRED}
    assert named == {name: x.__forward_arg__ for name, x in keywords.__annotations__.items()}


def test_dir_is_complete() -> None:
    assert set(cute_flash.__all__) <= set(dir(cute_flash))
    assert all(hasattr(cute_flash, name) for name in dir(cute_flash))


COMMAND_LINE = """
import sys
sys.argv[0] = "bin/cute-flash"
import cute_flash
assert "torch" not in sys.modules
print(all(getattr(cute_flash, name) is not None for name in cute_flash.__all__))
"""


def test_all_names_are_there_in_the_command_line() -> None:
    """A process called `cute-flash` imports them on first use."""
    done = subprocess.run([sys.executable, "-c", COMMAND_LINE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
