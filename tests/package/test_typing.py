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
# Overloads name these too: the first is required, and the second replaces `v_cache`.
NAMED = {"cache_seqlens", "value_dim"}


def test_mypy_checks_the_types_of_results() -> None:
    """`make lint` runs mypy, which also reports the ignored errors of the file that do not occur."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.mypy]")[2]
    assert '"tests/package/typing_cases.py"' in settings and "warn_unused_ignores = true" in settings
    assert (ROOT / "tests" / "package" / "typing_cases.py").exists()
    lint = subprocess.run(["make", "-n", "-C", str(ROOT), "lint"], capture_output=True, text=True, check=True).stdout
    assert any(line.endswith("/mypy") for line in lint.splitlines())


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
    named = {x.name: x.annotation for x in parameters if x.kind == x.KEYWORD_ONLY and x.name not in RESULTS | NAMED}
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


@pytest.mark.processes
def test_all_names_are_there_in_the_command_line() -> None:
    """A process called `cute-flash` imports them on first use."""
    done = subprocess.run([sys.executable, "-c", COMMAND_LINE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
