"""The digest that names an entry of the compile cache covers everything that decides the code, and nothing else."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cute_flash.jit import digest as naming
from cute_flash.jit import toolchain
from cute_flash.jit.digest import digest
from cute_flash.planning.launch import CompileKey, LaunchChain
from cute_flash.planning.plan import plan_forward
from cute_flash.score_mod.bound import BoundMods
from cute_flash.score_mod.mod_spec import ModSpec
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import Problem

PACKAGE = Path(naming.__file__).parents[1]


ARCH = {"sm80": "sm_80", "sm90": "sm_90"}


def key_of(family: str = "sm80", head_dim: int = 64) -> CompileKey:
    return plan_forward(Problem(1, 2, 2, 100, 100, head_dim), ARCHS[ARCH[family]], family).main


@pytest.fixture
def clear_facts() -> Iterator[Callable[[], None]]:
    """A function that clears the cached digests of sources and versions; also called after the test."""

    def clear() -> None:
        for cached in (naming.source_digest, toolchain.toolchain, toolchain.runtime_library):
            cached.cache_clear()

    yield clear
    clear()


def test_digest_changes_with_all_that_is_compiled_in() -> None:
    ampere, hopper = key_of("sm80"), key_of("sm90", 128)
    others = [
        hopper,
        replace(ampere, kernel="fwd_sm90"),
        replace(ampere, target="sm_86"),
        # Kernels take arguments by position, so a renamed or moved operand makes another kernel.
        replace(ampere, operands=(*ampere.operands[1::-1], *ampere.operands[2:])),
    ]
    assert {f.name for f in fields(ampere)} == {"kernel", "static", "tile", "target", "operands"}
    function = BoundMods.of(lambda score, b, h, q, kv: score * 2, None, None)
    statics: dict[str, Any] = {"dtype": "float16", "head_dim": 56, "head_dim_v": 32, "features": ("softcap",)}
    statics |= {"mods": ModSpec(function.graphs)}
    ampere_tile = {"head_dim": 96, "tile_m": 256, "tile_n": 128, "num_warps": 2, "stages": 1, "q_steps": 1}
    ampere_tile |= {"max_bounds": 0, "layout": "plain", "pieces": 2, "row_warps": 2}
    hopper_tile = {"head_dim": 96, "tile_m": 64, "tile_n": 48, "stages": 8, "q_stages": 1, "head_dim_v": 32}
    hopper_tile |= {"layout": "interleaved", "dropout_stages": 2, "bias_stages": 1}
    for key, part, values in (
        (ampere, "tile", ampere_tile),
        (hopper, "tile", hopper_tile),
        (ampere, "static", statics),
    ):
        described = getattr(key, part)
        compared = [f for f in fields(described) if f.compare]
        values |= {f.name: not getattr(described, f.name) for f in compared if isinstance(f.default, bool)}
        assert set(values) == {f.name for f in compared}, "a field is left out"
        for name, value in values.items():
            base = described
            if name == "row_warps":
                # It needs one stage, which is among the values too.
                base = replace(described, stages=1)
            others.append(replace(key, **{part: replace(base, **{name: value})}))
    others += [LaunchChain((ampere, hopper)), LaunchChain((hopper, ampere))]
    digests = [digest(each) for each in (ampere, *others)]
    assert len(set(digests)) == len(digests)
    assert digest(key_of()) == digests[0]


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_digest_does_not_change_with_evidence(family: str) -> None:
    key = key_of(family)
    when = {} if family == "sm80" else {"max_keys": 77, "is_bounded": True}
    cited = replace(key, tile=replace(key.tile, measured="H200: 700 TFLOP/s", **when))
    assert digest(cited) == digest(key)


def test_digest_changes_with_the_text_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clear_facts: Callable[[], None]
) -> None:
    shutil.copytree(PACKAGE, tmp_path / "cute_flash", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(naming, "__file__", str(tmp_path / "cute_flash" / "jit" / "digest.py"))

    def digest_now() -> str:
        clear_facts()
        return digest(key_of())

    seen = [digest_now()]
    assert digest_now() == seen[0]
    deciding = [
        "kernels/sm80/fwd.py",
        "kernels/sm90/bwd.py",
        "kernels/common/fakes.py",
        "device/scores/mask.py",
        "smem/tile.py",
        "score_mod/lower.py",
        "spec/features.py",
        "spec/problem.py",
        "planning/registry.py",
        "planning/tiles/fwd_sm90.py",
        "jit/compile.py",
    ]
    for name in deciding:
        with open(tmp_path / "cute_flash" / name, "a") as file:
            file.write("# one more line\n")
        seen.append(digest_now())
        assert len(set(seen)) == len(seen), name
    for name in ("api.py", "ops.py", "jit/kernels.py", "runtime/binder.py", "tools/cli.py", "reference/tiled.py"):
        with open(tmp_path / "cute_flash" / name, "a") as file:
            file.write("# one more line\n")
        assert digest_now() == seen[-1], name


@pytest.mark.parametrize("package", ["nvidia-cutlass-dsl", "apache-tvm-ffi"])
def test_digest_changes_with_the_versions_of_the_tools(
    package: str, monkeypatch: pytest.MonkeyPatch, clear_facts: Callable[[], None]
) -> None:
    before = digest(key_of())
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0" if name == package else real(name))
    clear_facts()
    assert digest(key_of()) != before


def test_digest_changes_with_the_flavour_of_the_runtime(
    monkeypatch: pytest.MonkeyPatch, clear_facts: Callable[[], None]
) -> None:
    digests = set()
    for flavour in ("cu12", "cu13"):
        clear_facts()
        library = Path("site", flavour, "lib", "libcute_dsl_runtime.so")
        with monkeypatch.context() as patch:
            patch.setattr(toolchain, "runtime_library", lambda library=library: library)
            digests.add(digest(key_of()))
    assert len(digests) == 2


@pytest.mark.parametrize(("driver", "flavour"), [(0, "cu13"), (13000, "cu13"), (14010, "cu13"), (12090, "cu12")])
def test_the_runtime_is_the_newest_that_the_driver_serves(
    driver: int, flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clear_facts: Callable[[], None]
) -> None:
    clear_facts()
    package = tmp_path / "dsl" / "python_packages" / "cutlass"
    for name in ("cu12", "cu13"):
        library = tmp_path / "dsl" / name / "lib" / "libcute_dsl_runtime.so"
        library.parent.mkdir(parents=True)
        library.touch()
    monkeypatch.setattr(toolchain, "find_spec", lambda _: SimpleNamespace(origin=str(package / "__init__.py")))
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: driver)
    assert toolchain.runtime_library() == tmp_path / "dsl" / flavour / "lib" / "libcute_dsl_runtime.so"
    toolchain.runtime_library.cache_clear()
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: 11080)
    with pytest.raises(ModuleNotFoundError, match="no flavour of nvidia-cutlass-dsl for a CUDA 11 driver"):
        toolchain.runtime_library()
    monkeypatch.setattr(toolchain, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="nvidia-cutlass-dsl is not installed"):
        toolchain.runtime_library()
