"""Imports between the folders of the package, and the cost of `import cute_flash`."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cute_flash.jit.digest import source_files
from tests.import_graph import ROOT, files, imports, module_name, reached_from, tree_of

# Folders and top modules of cute_flash from the lowest rank to the highest. A module imports from its own folder and
# from those before it. docs/architecture.md has the table.
RANKS = (
    "errors", "version", "smem", "score_mod", "spec", "planning", "device", "kernels", "jit", "runtime", "reference",
    "masks", "ops", "ops_decode", "decode", "api", "distributed", "tools", "integrations", "__main__",
)  # fmt: skip
# Modules at the top of cute_flash besides `__init__`.
MAX_TOP_MODULES = 8

# The DSL takes seconds to import. Kernels and their parts import it at once, jit/ when it first compiles or loads.
DSL = ("cutlass", "tvm_ffi", "cuda")
TRACED = ("device", "kernels")
DSL_IN_FUNCTIONS = ("jit",)


MODULES = files()
CUTE_FLASH = [name for name in MODULES if name.startswith("cute_flash.")]


def folder(module: str) -> str:
    """The folder of cute_flash, or the module at its top, that a module belongs to."""
    return module.split(".")[1] if "." in module else ""


def test_imports_are_read() -> None:
    found = dict(imports("cute_flash.spec.describe"))
    assert found["cute_flash.spec.bias"] is False
    assert found["cute_flash.score_mod.mod_spec"] is True
    assert dict(imports("cute_flash.jit.compile"))["cutlass.cute"] is True


# ---- ranks


def test_every_folder_has_a_rank() -> None:
    assert {folder(name) for name in CUTE_FLASH} <= set(RANKS)


def test_folders_import_only_lower_ranks() -> None:
    for module in CUTE_FLASH:
        allowed = RANKS[: RANKS.index(folder(module)) + 1]
        for name, _ in imports(module):
            if name == "cute_flash":
                assert folder(module) in ("tools", "integrations"), f"{module} imports the whole package"
            elif name.startswith("cute_flash."):
                assert folder(name) in allowed, f"{module} imports {name}"


def test_kernels_of_a_family_stand_alone() -> None:
    """kernels/sm80, sm90 and decode share device/ and kernels/common, which imports none of them."""
    for module in CUTE_FLASH:
        if not module.startswith("cute_flash.kernels."):
            continue
        own = module.split(".")[2]
        for name, _ in imports(module):
            if name.startswith("cute_flash.kernels."):
                assert name.split(".")[2] in (own, "common"), f"{module} imports {name}"


def test_few_modules_are_at_the_top() -> None:
    top = [path.stem for path in (ROOT / "cute_flash").glob("*.py") if path.stem != "__init__"]
    assert len(top) <= MAX_TOP_MODULES, top


def test_the_table_of_folders_is_complete() -> None:
    """docs/architecture.md lists every folder, in the order of ranks."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2] for line in page.partition("## Folders")[2].splitlines() if line.startswith("| ")][1:]
    listed = [name.strip() for row in rows for name in row.split(",")]
    assert listed == [name for name in RANKS if name in listed]
    assert {folder(name) for name in CUTE_FLASH if (ROOT / "cute_flash" / folder(name)).is_dir()} <= set(listed)


# ---- the DSL


def test_the_dsl_is_imported_by_traced_code_and_jit_only() -> None:
    for module in MODULES:
        if module.startswith("cute_flash.") and folder(module) in TRACED:
            continue
        for name, in_function in imports(module):
            if name.partition(".")[0] in DSL:
                assert folder(module) in DSL_IN_FUNCTIONS, f"{module} imports {name}"
                assert in_function, f"{module} imports {name} before it is needed"


def test_the_cache_digest_covers_what_kernels_import() -> None:
    """Kernels are traced: any module that they import may decide machine code."""
    reached = reached_from(name for name in CUTE_FLASH if folder(name) in TRACED)
    assert {folder(name) for name in reached} >= {*TRACED, "smem", "score_mod", "spec", "planning"}
    package = ROOT / "cute_flash"
    covered = {module_name(Path(path)) for path in source_files(str(package))}
    # Exception classes do not change the code.
    assert reached - covered <= {"cute_flash.errors"}


# ---- the wheel

# Folders of the repository that are not in the wheel, and the modules that look for a part of them at run time.
OUTSIDE = ("layouts", "profiling", "tests")
OPTIONAL = {"cute_flash.reference": {"layouts.studies.loops"}, "cute_flash.tools.studies": {"layouts.studies"}}


def test_the_wheel_stands_alone() -> None:
    """The wheel holds `cute_flash` only, so nothing there imports another folder of the repository.

    Two modules look for studies at run time, and explain where they are if this is not a checkout; test_wheel.py tests
    that.
    """
    for module in ("cute_flash", *CUTE_FLASH):
        outside = {name for name, _ in imports(module) if name.partition(".")[0] in OUTSIDE}
        nodes = ast.walk(tree_of(module))
        texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
        named = {x for x in texts if isinstance(x, str) and re.fullmatch(rf"({'|'.join(OUTSIDE)})(\.\w+)+", x)}
        assert outside | named == OPTIONAL.get(module, set()), module


IMPORT = """
import json, sys, torch
before = set(sys.modules)
import cute_flash
package = set(sys.modules) - before
assert torch.ops.cute_flash.attention_fwd.default.name() == "cute_flash::attention_fwd"
import cute_flash.tools.cli, layouts.__main__
tools = set(sys.modules) - before - package
print(json.dumps({"package": sorted(package), "tools": sorted(tools)}))
"""


@pytest.mark.processes
def test_import_is_light() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    package, tools = ({name.partition(".")[0] for name in answer[part]} for part in ("package", "tools"))
    # Beyond torch, the package imports itself, modules of Python, and little of either.
    assert "cute_flash" in package <= {"cute_flash", *sys.stdlib_module_names}, package
    assert len(answer["package"]) <= 80, answer["package"]
    # The command lines of the package and of `layouts`.
    assert {"cute_flash", "layouts"} <= tools and not tools & {"cutlass", "tvm_ffi", "rich"}
