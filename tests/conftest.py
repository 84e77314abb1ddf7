"""The environment of all tests: no CUTE_FLASH_* variable of the caller, and caches of the test session.

All tests and workers of pytest-xdist share the kernel cache, so that a kernel is compiled once. `--kernel-cache=DIR`
keeps it between sessions. Inductor's cache is not kept: its key does not cover the schema of an operator, so it may
hold calls with argument names of an earlier version. Only tests with the marker `compiles` or `gpu` may run the DSL's
compiler, so that `make test-fast` stays fast. Tests with the marker `kernels` compile whole kernels. They are
deselected while the sources of these kernels are those recorded with the lock (`tests.lock.sources`), unless
`--all-kernels` is given or the command names their file.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

PREFIX = "CUTE_FLASH_"
_folder = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-cache", metavar="DIR", help="keep the kernels that tests compile in DIR")
    parser.addoption("--all-kernels", action="store_true", help="compile the kernels of all compile gates")
    parser.addoption("--combinations", metavar="N", type=int, default=300, help="random calls of each family on a GPU")
    parser.addoption(
        "--random-calls", metavar="N", type=int, help="random calls with the oracle of tests/definition.py"
    )
    parser.addoption("--fuzz-seconds", metavar="S", type=float, default=0.0, help="seconds of random arguments")
    parser.addoption("--pack", metavar="WHEEL", type=Path, help="a pack of kernels, for tests/gpu/test_pack.py")
    parser.addoption("--tiles-of", metavar="GPU", help="run tests/gpu with the mma.sync tiles of a GPU, such as A100")
    parser.addoption("--support", metavar="FOLDER", help="write the support matrix of random calls to FOLDER")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # A worker of xdist inherits the environment that the controller set below.
        return
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    folder = config.stash[_folder] = tempfile.mkdtemp(prefix="cute_flash_tests_")
    kernels = config.getoption("--kernel-cache") or f"{folder}/kernels"
    os.environ["CUTE_FLASH_CACHE_DIR"] = str(Path(kernels).absolute())
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    os.environ["TESTS_COMPILE_ALL_KERNELS"] = "1" * config.getoption("--all-kernels")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _folder in config.stash:
        shutil.rmtree(config.stash[_folder], ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests with the marker `gpu` if there is no GPU; deselect those of kernels that no change reaches."""
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    if not config.getoption("--all-kernels") and any(item.get_closest_marker("kernels") for item in items):
        from tests.lock.sources import reaches

        kept = {item: item.path in named or reaches(item) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not kept[item]])
        items[:] = [item for item in items if kept[item]]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))


def pytest_collection_finish() -> None:
    """Exclude what was imported and collected from garbage collections, which would visit a million objects each."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    dsl = sys.modules.get("cutlass.base_dsl.dsl")
    if dsl is None or item.get_closest_marker("compiles") or item.get_closest_marker("gpu"):
        return (yield)
    with mock.patch.object(dsl.BaseDSL, "generate_mlir", _refuse_to_compile):
        return (yield)


def _refuse_to_compile(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("this test compiles: mark it with @pytest.mark.compiles")


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make FlexAttention run without torch.compile. The forward gives the same results."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty kernel cache for one test, on disk and in memory, and no installed pack."""
    from cute_flash.jit import kernels, pack

    folder = tmp_path / "kernels"
    monkeypatch.setenv("CUTE_FLASH_CACHE_DIR", str(folder))
    monkeypatch.setattr(kernels, "_functions", {})
    monkeypatch.setattr(kernels, "_counts", Counter())
    monkeypatch.setattr(pack, "find_spec", lambda name: None)
    cached = (pack.installed_pack, pack.matching_pack, pack._log_once)
    for function in cached:
        function.cache_clear()
    yield folder
    for function in cached:
        function.cache_clear()
