"""`install_as_flash_attn`: the names that `import flash_attn` then provides, and refusals."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import cute_flash
from cute_flash.integrations import bert_padding, flash_attn

ROOT = Path(__file__).parents[2]


def ours() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = {name: sys.modules.pop(name) for name in ours()}
    yield
    for name in ours():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another flash_attn, installed."""
    (tmp_path / "flash_attn" / "layers").mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '9'\n")
    (tmp_path / "flash_attn" / "layers" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def absent() -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed")


def test_names(absent: None) -> None:
    assert cute_flash.install_as_flash_attn() is None
    package = importlib.import_module("flash_attn")
    assert package.__version__ == "2.8.4"
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

    assert package.flash_attn_interface is sys.modules["flash_attn.flash_attn_interface"]
    assert flash_attn_func is flash_attn.flash_attn_func
    assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert flash_attn_with_kvcache is package.flash_attn_with_kvcache
    assert (index_first_axis, pad_input, unpad_input) == (
        bert_padding.index_first_axis,
        bert_padding.pad_input,
        bert_padding.unpad_input,
    )
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.name == name
        assert sys.modules[name].__package__ == "flash_attn"
    assert importlib.util.find_spec("flash_attn.layers") is None
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.layers"):
        importlib.import_module("flash_attn.layers")


def test_a_second_call_has_no_effect(absent: None) -> None:
    cute_flash.install_as_flash_attn()
    package = sys.modules["flash_attn"]
    cute_flash.install_as_flash_attn()
    assert sys.modules["flash_attn"] is package


def test_metadata(absent: None) -> None:
    cute_flash.install_as_flash_attn(metadata=True)
    assert importlib.metadata.version("flash-attn") == importlib.metadata.version("flash_attn") == "2.8.4"
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert importlib.metadata.version("torch")
    for name in ours():
        del sys.modules[name]
    for _ in range(2):
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash-attn")
        cute_flash.install_as_flash_attn()


@pytest.mark.parametrize("is_imported", [False, True])
def test_another_flash_attn(foreign: None, is_imported: bool) -> None:
    if is_imported:
        importlib.import_module("flash_attn.layers")
    with pytest.raises(ValueError, match="another flash_attn is installed: pass replace=True"):
        cute_flash.install_as_flash_attn()
    assert importlib.import_module("flash_attn").__version__ == "9"
    cute_flash.install_as_flash_attn(replace=True)
    assert importlib.import_module("flash_attn").__version__ == "2.8.4"
    assert "flash_attn.layers" not in sys.modules
    for name in ours():
        del sys.modules[name]
    assert importlib.import_module("flash_attn").__version__ == "9"


def test_a_module_without_a_spec_is_not_replaced() -> None:
    sys.modules["flash_attn"] = ModuleType("flash_attn")
    with pytest.raises(ValueError, match="replace=True"):
        cute_flash.install_as_flash_attn()


@pytest.mark.processes
def test_adapters_are_imported_on_demand() -> None:
    code = "import sys, cute_flash; print([x for x in sys.modules if 'integrations' in x or x == 'flash_attn'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
