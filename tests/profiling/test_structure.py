"""The packages of profiling: imports go down in rank, and names use one word for a thing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from profiling.measure.machine import ROOT
from tests.package.test_vocabulary import defined_names, words

FOLDER = ROOT / "profiling"
# From the lowest rank to the highest. A module imports from its own package and from those before it.
RANKS = ("measure", "peers", "bench", "tune", "counters", "studies", "documents", "__main__")
# Word of an identifier -> the word to write.
WORDS = {
    "side": "peer, version, variant, or a call", "sides": "peers, versions, variants, or calls",
    "provider": "peer", "providers": "peers", "contender": "timed call", "contenders": "timed calls",
    "rival": "peer", "opponent": "peer", "competitor": "peer",
}  # fmt: skip
# Fields that are keys of checked-in result files, or names of options.
FILE_KEYS = {"bench/bench.py": {"providers"}}
PATHS = sorted(FOLDER.rglob("*.py"))


def place(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


def package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def modules() -> dict[str, set[str]]:
    """Module -> the modules of profiling that it imports."""
    names = {f"profiling.{place(path).removesuffix('.py').replace('/', '.')}": path for path in PATHS}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("profiling"):
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= {x if x in names else str(node.module) for x in inner}
    return found


IMPORTS = modules()


@pytest.mark.parametrize("module", [name for name in IMPORTS if package(name) in RANKS])
def test_packages_import_only_lower_ranks(module: str) -> None:
    allowed = RANKS[: RANKS.index(package(module)) + 1]
    wrong = [name for name in IMPORTS[module] if package(name) not in allowed]
    assert not wrong, f"{module} imports {', '.join(wrong)}"


def test_every_module_has_a_package() -> None:
    assert {package(name) for name in IMPORTS} == {*RANKS, "__init__"}


def test_no_module_imports_itself_through_others() -> None:
    def reached(name: str, seen: set[str]) -> set[str]:
        for other in IMPORTS.get(name, ()):
            if other not in seen:
                seen.add(other)
                reached(other, seen)
        return seen

    assert [name for name in IMPORTS if name in reached(name, set())] == []


@pytest.mark.parametrize("path", PATHS, ids=place)
def test_one_word_for_a_thing(path: Path) -> None:
    allowed = FILE_KEYS.get(place(path), set())
    names = [*defined_names(ast.parse(path.read_text(encoding="utf-8"))), (1, path.stem)]
    wrong = [
        f"line {line}: {name}: write {WORDS[word]}"
        for line, name in names
        for word in words(name)
        if word in WORDS and word not in allowed
    ]
    assert not wrong, "\n".join(wrong)
