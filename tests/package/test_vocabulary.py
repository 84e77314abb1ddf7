"""Defined names (modules, classes, functions, fields) use the field's words: none of the words below."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "cute_flash"

# Private word of an identifier -> the word that the field uses.
WORDS = {
    "packed": "varlen, or pack_gqa", "packs": "pack_gqa", "how": "args", "custom": "mods", "given": "a noun",
    "asked": "a noun", "more": "a noun", "found": "a noun", "general": "features", "written": "mods",
    "entries": "block indices", "entry": "block index", "work": "tile list", "prepare": "scheduler",
    "items": "tile list", "section": "heads_per_l2_group", "ring": "pipeline", "fill": "stage",
    "turns": "WarpgroupOrder", "turn": "WarpgroupOrder", "tell": "publish", "told": "read", "follow": "consumer",
    "drawn": "dropout mask", "kept": "dropout mask", "draws": "dropout producer", "span": "seqlen info",
    "walk": "block iterator", "cut": "masked", "cuts": "masked", "whole": "full", "hide": "apply_mask",
    "hides": "apply_mask", "suspicious": "speculative row max",
    "weight": "feature_cost", "ordered": "deterministic", "around": "preprocess, postprocess",
    "extras": "score params", "ranges": "nvtx", "ticker": "progress", "memo": "tensor cache",
    "launchable": "ensure_aligned",
}  # fmt: skip
NAMES = {
    "BlockMap", "BlockList", "EntryList", "WorkList", "TileOrder", "TileQueue", "OfHead", "Sequence", "How", "Custom",
    "Given", "pass_on", "checks_sums", "draws_tiles", "packs_heads", "LIGHT", "MEDIUM", "HEAVY", "MOST",
}  # fmt: skip
MODULES = {"partial"}
# Words that are the field's words in one folder or module: ring attention.
ALLOWED = {"distributed": {"ring"}}


def words(name: str) -> list[str]:
    """The words of an identifier in snake_case or CamelCase."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)]


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.lineno, field.target.id
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((node.lineno, x.id) for x in node.targets if isinstance(x, ast.Name))


def test_words_are_split() -> None:
    assert words("TileOrder") == ["tile", "order"]
    assert words("LSE_log2") == ["lse", "log"]
    assert words("_packs_heads") == ["packs", "heads"]


def test_names_are_the_fields_words() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        private = set(WORDS) - ALLOWED.get(path.parent.name, set()) - ALLOWED.get(path.stem, set())
        if path.stem in MODULES or set(words(path.stem)) & private:
            wrong.append(f"module {path}")
        for line, name in defined_names(ast.parse(path.read_text())):
            bad = [f"{word} ({WORDS[word]})" for word in words(name) if word in private]
            if bad or name in NAMES:
                wrong.append(f"{path}:{line}: {name}: {', '.join(bad)}")
    assert not wrong, "\n".join(wrong)
