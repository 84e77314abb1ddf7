"""The installed pack of kernels: it is used only if this installation would compile the same objects, and a log line
says why it is not. `tests/tools/test_pack.py` tests how a pack is built.

The compiler and the loader are replaced: an object is a few bytes, and a loaded kernel returns them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cute_flash.jit import kernels, pack
from cute_flash.jit.digest import build_facts, digest
from cute_flash.jit.disk import DiskCache
from cute_flash.jit.kernels import CacheInfo, cache_info, compiled_kernel, forget, precompile
from cute_flash.jit.pack import FACTS, PACKAGE, Manifest
from cute_flash.planning.launch import LaunchKey
from cute_flash.planning.plan import plan_forward
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import Problem

COMPILED, PACKED = b"compiled now", b"from the pack"


def key_of(target: str = "sm_80", head_dim: int = 64) -> LaunchKey:
    return plan_forward(Problem(1, 2, 2, 100, 100, head_dim), ARCHS[target], "sm80").main


@pytest.fixture
def log() -> Iterator[list[str]]:
    """The messages that the pack logs."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    pack.logger.addHandler(handler)
    yield messages
    pack.logger.removeHandler(handler)


@pytest.fixture
def builds(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[LaunchKey]:
    """The keys that the stand-in for the compiler was given."""
    keys: list[LaunchKey] = []

    def build(key: LaunchKey) -> tuple[bytes, str]:
        keys.append(key)
        return COMPILED, ".so"

    monkeypatch.setattr(kernels, "compile_object", build)
    monkeypatch.setattr(kernels, "load_object", lambda path: path.read_bytes)
    return keys


Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: list[LaunchKey]) -> Install:
    """Install a pack with the objects of some keys, and return its folder."""

    def install(*keys: LaunchKey, **facts: str) -> Path:
        folder = tmp_path / "site" / PACKAGE
        objects: dict[str, dict[str, str]] = {}
        for key in keys:
            path = folder / key.target / f"{digest(key)}.so"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(PACKED)
            objects.setdefault(key.target, {})[digest(key)] = hashlib.sha256(PACKED).hexdigest()
        (folder / "manifest.json").write_text(Manifest("0.0", {**build_facts(), **facts}, objects).to_json())
        (folder / "__init__.py").write_text("raise AssertionError('a pack is not imported')")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.setattr(pack, "find_spec", importlib.util.find_spec)
        return folder

    return install


def test_a_kernel_of_the_pack_is_loaded_in_place(install: Install, builds: list[LaunchKey], log: list[str]) -> None:
    install(key_of())
    assert compiled_kernel(key_of())() == PACKED
    assert compiled_kernel(key_of())() == PACKED
    assert cache_info() == CacheInfo(pack_hits=1, memory_hits=1)
    assert (builds, log, DiskCache.default().files()) == ([], [], [])


def test_a_kernel_that_the_pack_lacks_is_compiled(install: Install, builds: list[LaunchKey], log: list[str]) -> None:
    install(key_of())
    assert compiled_kernel(key_of(head_dim=128))() == COMPILED
    assert cache_info() == CacheInfo(compiles=1)
    assert (builds, log) == ([key_of(head_dim=128)], [])


def test_the_users_cache_comes_first(install: Install, log: list[str]) -> None:
    compiled_kernel(key_of())
    forget()
    install(key_of())
    assert compiled_kernel(key_of())() == COMPILED
    assert cache_info() == CacheInfo(compiles=1, disk_hits=1)


def test_precompile_leaves_out_what_the_pack_has(
    install: Install, builds: list[LaunchKey], tmp_path: Path, log: list[str]
) -> None:
    install(key_of())
    assert precompile(key_of()) is False and precompile(key_of(head_dim=128)) is True
    assert builds == [key_of(head_dim=128)]
    # Into another folder, such as that of a new pack, it is compiled.
    (tmp_path / "work").mkdir(mode=0o700)
    assert precompile(key_of(), DiskCache(tmp_path / "work")) is True
    assert precompile(key_of(), DiskCache(tmp_path / "work")) is False


@pytest.mark.parametrize("fact", FACTS)
def test_a_pack_that_was_built_differently_is_ignored(
    fact: str, install: Install, builds: list[LaunchKey], log: list[str]
) -> None:
    install(key_of(), key_of(head_dim=128), **{fact: "another"})
    assert compiled_kernel(key_of())() == compiled_kernel(key_of(head_dim=128))() == COMPILED
    assert cache_info() == CacheInfo(compiles=2)
    (line,) = log
    assert line.startswith("cute-flash-kernels 0.0 is not used: it was built with") and FACTS[fact] in line
    assert not any(text in line for name, text in FACTS.items() if name != fact)
    assert fact == "sources" or f"another instead of {build_facts()[fact]};" in line


def test_the_facts_have_names() -> None:
    assert set(FACTS) == set(build_facts())


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(PACKED[:-1]),
        lambda path: path.write_bytes(PACKED[:-1] + b"x"),
        lambda path: path.unlink(),
    ],
    ids=["truncated", "altered", "gone"],
)
def test_a_damaged_object_is_compiled_instead(damage: Callable[[Path], None], install: Install, log: list[str]) -> None:
    folder = install(key_of(), key_of(head_dim=128))
    damage(folder / "sm_80" / f"{digest(key_of())}.so")
    assert compiled_kernel(key_of())() == COMPILED
    (line,) = log
    assert digest(key_of()) in line and "pip install --force-reinstall cute-flash-kernels" in line
    # The other objects are used.
    assert compiled_kernel(key_of(head_dim=128))() == PACKED
    assert cache_info() == CacheInfo(compiles=1, pack_hits=1) and len(log) == 1


def test_an_object_that_cannot_be_loaded_is_compiled_instead(
    install: Install, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    install(key_of())

    def load(path: Path) -> Callable[[], bytes]:
        if PACKAGE in path.parts:
            raise OSError("undefined symbol: launch")
        return path.read_bytes

    monkeypatch.setattr(kernels, "load_object", load)
    assert compiled_kernel(key_of())() == COMPILED
    (line,) = log
    assert "undefined symbol: launch" in line


def test_a_pack_for_other_architectures_says_so_once(install: Install, log: list[str]) -> None:
    install(key_of(), key_of("sm_89"))
    assert compiled_kernel(key_of("sm_86"))() == compiled_kernel(key_of("sm_86", 128))() == COMPILED
    assert compiled_kernel(key_of())() == PACKED
    (line,) = log
    assert "has kernels for sm_80, sm_89, none for sm_86" in line


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 0}', '{"format": 1}', '{"format": 1, "version": "", "facts": {}, "files": {}}']
)
def test_a_manifest_that_cannot_be_read_is_ignored(text: str, install: Install, log: list[str]) -> None:
    folder = install(key_of())
    (folder / "manifest.json").write_text(text)
    assert compiled_kernel(key_of())() == compiled_kernel(key_of(head_dim=128))() == COMPILED
    (line,) = log
    assert line.startswith(f"{folder} is not used")


def test_a_pack_without_a_manifest_is_ignored(install: Install, log: list[str]) -> None:
    folder = install(key_of())
    (folder / "manifest.json").unlink()
    assert compiled_kernel(key_of())() == COMPILED
    assert len(log) == 1 and "No such file" in log[0]
