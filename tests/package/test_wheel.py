"""The wheel: what it installs, and that it imports beside foreign modules of the names that the repository uses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("cute_flash", "layouts", "profiling", "tests")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the repository, because setuptools writes into the source folder."""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results", "reports"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(source / "dist")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (source / "dist").iterdir()
    return path


def test_the_wheel_installs_cute_flash_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
        (scripts,) = (archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
    tops = {name.partition("/")[0] for name in names}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"cute_flash"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "cute_flash").rglob("*.py")}
    assert {name for name in names if name.startswith("cute_flash/")} == {*sources, "cute_flash/py.typed"}
    assert "cute-flash = cute_flash.tools.cli:main" in scripts
    headers = message_from_string(metadata)
    assert "Typing :: Typed" in headers.get_all("Classifier")


IMPORT = """
import torch, cute_flash, layouts
q = torch.ones(1, 1, 4, 8)
assert cute_flash.attn(q, q, q).shape == q.shape
assert cute_flash.__file__.startswith(FOLDER), cute_flash.__file__
assert layouts.MINE == 1
print("imported")
"""


@pytest.mark.parametrize("path", ["layouts.py", "layouts/__init__.py"])
def test_a_foreign_module_called_layouts_does_not_matter(wheel: Path, path: str, tmp_path: Path) -> None:
    installed, foreign = tmp_path / "installed", tmp_path / "foreign"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    (foreign / path).parent.mkdir(parents=True)
    (foreign / path).write_text("MINE = 1\n")
    environment = {**os.environ, "PYTHONPATH": f"{foreign}{os.pathsep}{installed}"}
    code = f"FOLDER = {str(installed)!r}\n{IMPORT}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=foreign, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("imported\n", 0), done.stderr
