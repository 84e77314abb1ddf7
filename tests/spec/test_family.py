"""The choice of a kernel family by the caller."""

from __future__ import annotations

import runpy
import threading

import pytest

from cute_flash.errors import UnsupportedError
from cute_flash.spec import family
from cute_flash.spec.family import FAMILIES, requested_family, use_kernels


def test_use_kernels_nests_and_ends_and_is_for_one_thread() -> None:
    assert requested_family() == ""
    seen = []
    with pytest.raises(RuntimeError, match="inside"), use_kernels("sm80"):
        with use_kernels("sm90"):
            assert requested_family() == "sm90"
        assert requested_family() == "sm80"
        thread = threading.Thread(target=lambda: seen.append(requested_family()))
        thread.start()
        thread.join()
        raise RuntimeError("inside")
    assert requested_family() == "" and seen == [""]


def test_an_unknown_family_is_refused_at_once() -> None:
    message = f"^kernel family 'sm70': use {' or '.join(FAMILIES)}, or '' for the best one$"
    with pytest.raises(UnsupportedError, match=message), use_kernels("sm70"):
        pytest.fail("entered")
    assert requested_family() == ""


@pytest.mark.parametrize("value", ["sm80", "", "sm99"])
def test_the_environment_chooses_the_family_of_a_process(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is read at import. `use_kernels` takes precedence; planning refuses unknown families."""
    monkeypatch.setenv("CUTE_FLASH_KERNELS", value)
    module = runpy.run_path(family.__file__)
    assert module["requested_family"]() == value
    with module["use_kernels"]("sm90"):
        assert module["requested_family"]() == "sm90"
