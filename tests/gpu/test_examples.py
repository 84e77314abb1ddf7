"""The examples on a GPU, in bf16, with the checks of tests/examples."""

from __future__ import annotations

import pytest

from tests.examples import checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", checks.CHECKS)
def test_results(name: str) -> None:
    assert checks.MODULES[name].DEVICE == "cuda"
    checks.CHECKS[name](2e-2)


def test_the_gpt_with_torch_compile() -> None:
    checks.check_train_gpt(2e-2, compile=True)
