"""The warning of GPUs on which kernels have not been run."""

from __future__ import annotations

import warnings

import pytest

from cute_flash import NotRunWarning
from cute_flash.runtime import gpu as module
from cute_flash.spec.arch import ARCHS


@pytest.mark.parametrize("name", ARCHS)
def test_the_first_call_on_a_gpu_without_a_run_warns_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "detect", lambda index: ARCHS[name])
    module._warn_not_run.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [module.Gpu().arch(index) for index in (0, 1, 0)] == [ARCHS[name]] * 3
    assert len(caught) == (name in ("sm_120", "sm_121"))
    for warning in caught:
        assert warning.category is NotRunWarning
        text = str(warning.message)
        assert "compiled for sm_120 and sm_121" in text and "have not been run" in text
        assert "cute-flash selftest" in text
