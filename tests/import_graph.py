"""The imports between modules of the repository, read from their source without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("cute_flash", "layouts")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def files() -> dict[str, Path]:
    """The file of each module of `PACKAGES`."""
    return {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(files()[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> tuple[tuple[str, bool], ...]:
    """(module, whether inside a function) of every import and of every `import_module("...")`."""
    return tuple(_imports(tree_of(module), in_function=False))


def _imports(tree: ast.AST, in_function: bool) -> Iterator[tuple[str, bool]]:
    for node in ast.iter_child_nodes(tree):
        inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in files() else str(node.module)), in_function
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), in_function
        yield from _imports(node, inside)


def reached_from(modules: Iterable[str], *, runs_packages: bool = True) -> set[str]:
    """The modules below `cute_flash` that the given ones import, directly or not, and the given ones.

    `runs_packages`: also the packages of these modules, which an import runs. Without them, only those packages from
    which a module imports a name.
    """
    pending, reached = list(modules), set[str]()
    while pending:
        name = pending.pop()
        if name.startswith("cute_flash.") and name not in reached:
            reached.add(name)
            pending += (found for found, _ in imports(name))
            if runs_packages:
                pending.append(name.rpartition(".")[0])
    return reached
