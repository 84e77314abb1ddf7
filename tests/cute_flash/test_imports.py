"""The shape of the house: who may import whom, what `import cute_flash` costs, how long files may grow."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cute_flash", "layouts")

# From the ground up: each may import what stands before it, and a package may import its own modules.
ORDER = (
    "layouts",
    *(
        f"cute_flash.{name}"
        for name in (
            "version", "ranges", "memo", "counters", "disk", "ticker", "band", "work", "problem", "mods",
            "block_map", "entries", "written", "arch", "tiles",
            "tiles_bwd", "tiles_fwd", "philox", "score", "loops", "dense",
            "reference", "roofline", "device", "kernels", "plan", "explain", "compile", "resources",
            "operands", "backward", "ops", "how", "forward", "backward_general", "packed",
            "packed_sums", "packed_cuda", "general", "custom_cuda", "backward_custom", "custom", "partial",
            "direct", "api", "varlen", "mask_pictures", "masks",
        )
    ),
    "cute_flash",  # the public names
    "layouts.__main__",  # draws what the tables of tiles say
    *(f"cute_flash.{name}" for name in ("integrations", "demo", "doctor", "cli", "__main__")),
)  # fmt: skip

# The DSL takes seconds to import. These rooms are made of it; those import it when they first need it.
DSL = ("cutlass", "tvm_ffi", "cuda")
MADE_OF_DSL = ("cute_flash.device", "cute_flash.kernels")
DSL_ON_DEMAND = ("cute_flash.compile", "cute_flash.band", "layouts.smem")

# Packages, whose modules import each other.
SEVERAL_MODULES = ("layouts", *MADE_OF_DSL, "cute_flash.mods", "cute_flash.integrations")

MAX_FILE, MAX_HOPPER_KERNEL, MAX_FUNCTION = 400, 600, 120


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


def room(module: str) -> str:
    """The entry of ORDER that a module belongs to: the longest that begins its name."""
    fitting = [entry for entry in ORDER if module == entry or module.startswith(entry + ".")]
    return max(fitting, key=len, default="")


def first_party(name: str) -> bool:
    return name.partition(".")[0] in (*PACKAGES, "profiling", "tests")


def test_imports_are_read() -> None:
    found = dict(imports(MODULES["cute_flash.ops"]))
    assert found["cute_flash.plan"] is False
    assert found["cute_flash.compile"] is True
    assert dict(imports(MODULES["layouts.smem"]))["cutlass.cute"] is True


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_upward(module: str) -> None:
    place = room(module)
    assert place != "cute_flash" or module == "cute_flash", f"{module} has no place in ORDER: give it one"
    for name, _ in imports(MODULES[module]):
        if not first_party(name):
            continue
        other = room(name)
        assert other, f"{module} imports {name}, which is not part of the product"
        if other == place and place in SEVERAL_MODULES:
            continue
        assert ORDER.index(other) < ORDER.index(place), f"{module} imports {name}, which stands above it"


@pytest.mark.parametrize("module", MODULES)
def test_the_dsl_stays_in_its_rooms(module: str) -> None:
    if room(module) in MADE_OF_DSL:
        return
    for name, in_function in imports(MODULES[module]):
        if name.partition(".")[0] in DSL:
            assert module in DSL_ON_DEMAND, f"{module} imports {name}"
            assert in_function, f"{module} imports {name} before anyone needs it"


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
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True
        )
        answer = json.loads(done.stdout)
        tops = {name.partition(".")[0] for name in answer["modules"]}
        assert "cute_flash" in tops
        assert not tops & {"cutlass", "tvm_ffi", "typer", "rich", "numpy", "matplotlib"}
        seconds.append(answer["seconds"])
        if seconds[-1] <= 0.1:
            return
    pytest.fail(f"import cute_flash took {min(seconds):.3f} s at best, beyond torch")


# Sizes

FILES = [
    path for folder in (*PACKAGES, "profiling", "tests") for path in sorted((ROOT / folder).rglob("*.py"))
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    is_hopper_kernel = path.parent.name == "kernels" and "sm90" in path.stem
    assert len(text.splitlines()) <= (MAX_HOPPER_KERNEL if is_hopper_kernel else MAX_FILE)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, functions):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION, f"{node.name} has {lines} lines"
