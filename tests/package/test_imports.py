"""The shape of the package: which folder imports which, and what `import cute_flash` costs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_flash.jit.compile import SOURCES

ROOT = Path(__file__).parents[2]
PACKAGES = ("cute_flash", "layouts")

# Folders of cute_flash from the lowest rank to the highest: a folder imports itself and those before it.
RANKS = (
    "errors", "smem", "score_mod", "spec", "planning", "device", "kernels", "jit", "runtime", "reference",
    "ops", "api", "tools", "integrations",
)  # fmt: skip

# The DSL takes seconds to import. These folders are written in it; those modules import it on demand.
DSL = ("cutlass", "tvm_ffi", "cuda")
IN_DSL = ("cute_flash.device", "cute_flash.kernels")
DSL_ON_DEMAND = ("cute_flash.jit.compile",)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): ast.parse(path.read_text())
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports(tree: ast.AST, in_function: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether inside a function) of every import, `import_module("...")` among them."""
    for node in ast.iter_child_nodes(tree):
        inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in MODULES else str(node.module)), in_function
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), in_function
        yield from imports(node, inside)


def folder(module: str) -> str:
    """The folder of cute_flash, or the module at its top, that a module belongs to."""
    return module.split(".")[1] if "." in module else ""


def rank(module: str) -> int:
    return RANKS.index(folder(module))


def test_imports_are_read() -> None:
    found = dict(imports(MODULES["cute_flash.ops"]))
    assert found["cute_flash.spec.describe"] is False
    assert found["cute_flash.runtime.launcher"] is True
    assert dict(imports(MODULES["cute_flash.jit.compile"]))["cutlass.cute"] is True


RANKED = [name for name in MODULES if name.startswith("cute_flash.") and folder(name) in RANKS]


@pytest.mark.parametrize("module", RANKED)
def test_folders_import_only_lower_ranks(module: str) -> None:
    for name, _ in imports(MODULES[module]):
        if name.startswith("cute_flash.") and folder(name) in RANKS:
            assert rank(name) <= rank(module), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_the_dsl_is_imported_in_few_folders(module: str) -> None:
    if module.startswith(IN_DSL):
        return
    for name, in_function in imports(MODULES[module]):
        if name.partition(".")[0] in DSL:
            assert module in DSL_ON_DEMAND, f"{module} imports {name}"
            assert in_function, f"{module} imports {name} at import"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("cute_flash")])
def test_the_wheel_stands_alone(module: str) -> None:
    """The wheel holds `cute_flash` only, so nothing there imports another folder of the repository."""
    outside = {"layouts", "profiling", "tests"}
    assert not outside & {name.partition(".")[0] for name, _ in imports(MODULES[module])}


def test_the_cache_digest_covers_what_kernels_import() -> None:
    """Kernels are traced: any module below them may decide machine code."""
    pending = [name for name in MODULES if name.startswith(IN_DSL)]
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name.startswith("cute_flash.") and name not in reached:
            reached.add(name)
            pending += (found for found, _ in imports(MODULES[name]))
    package = ROOT / "cute_flash"
    covered = {module_name(path) for pattern in SOURCES for path in package.glob(pattern)}
    # Ranges of a profiler's timeline and the classes of errors decide no code.
    assert reached - covered <= {"cute_flash.errors", "cute_flash.jit.nvtx"}


# CPU time, which a busy machine does not stretch; torch itself is not ours.
IMPORT = """
import json, sys, time, torch
before, start = set(sys.modules), time.process_time()
import cute_flash
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""


def test_import_is_light() -> None:
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout)
        tops = {name.partition(".")[0] for name in answer["modules"]}
        assert "cute_flash" in tops
        assert not tops & {"cutlass", "tvm_ffi", "typer", "rich", "numpy", "matplotlib"}
        seconds.append(answer["seconds"])
        if seconds[-1] <= 0.1:
            return
    pytest.fail(f"import cute_flash took {min(seconds):.3f} s at best, beyond torch")
