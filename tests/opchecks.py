"""`torch.library.opcheck` in two parts: the registration of an operator, and its trace by AOTAutograd.

The trace compiles with dynamic shapes and takes nine tenths of the time, so it has the marker `compiles`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

each_part = pytest.mark.parametrize(
    "part",
    [
        pytest.param(("test_schema", "test_autograd_registration", "test_faketensor"), id="registration"),
        pytest.param(("test_aot_dispatch_dynamic",), id="traced", marks=pytest.mark.compiles),
    ],
)


def assert_opcheck(part: tuple[str, ...], op: Any, *values: Any) -> None:
    assert torch.library.opcheck(op, values, test_utils=part) == dict.fromkeys(part, "SUCCESS")
