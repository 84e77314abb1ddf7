"""The wheel: its contents, and its import beside foreign modules named like folders of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
REPOSITORY = "https://example.org/team/cute_flash"
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
    environment = {**os.environ, "CUTE_FLASH_REPOSITORY": REPOSITORY}
    done = subprocess.run([*command, str(source)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (source / "dist").iterdir()
    return path


@pytest.mark.slow
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
    assert f"Source, {REPOSITORY}" in headers.get_all("Project-URL")
    description = headers.get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", description)
    assert any(link.startswith(f"{REPOSITORY}/raw/HEAD/") and link.endswith(".svg") for link in links)
    assert all(link.startswith(("https://", "#")) for link in links)


# A child is forked for each folder after torch, because importing torch takes most of the time.
IMPORT = """
import os, sys, torch
sys.path[:0] = FOREIGN[:1] if os.fork() == 0 else FOREIGN[1:]
import cute_flash, cute_flash.reference, layouts
from cute_flash.tools import cli
q = torch.ones(1, 1, 4, 8)
assert cute_flash.attn(q, q, q).shape == q.shape
assert cute_flash.__file__.startswith(FOLDER), cute_flash.__file__
assert layouts.__file__ == f"{sys.path[0]}/{layouts.NAME}"
for command in ("tiles", "loops --help", "explain 1,2,64,64 --cp 2"):
    assert cli.main(command.split()) == 2
try:
    cute_flash.reference.tiled_q_outer
except AttributeError as error:
    assert "tiled_q_outer is in layouts/studies/loops.py of the repository" in str(error)
else:
    raise AssertionError("the wheel has the loop orders")
os.write(1, f"imported beside {layouts.NAME}\\n".encode())
"""
MISSING = [
    "cute-flash: tiles is a study that the wheel does not hold: run it in a checkout of the repository, as python -m "
    "layouts tiles ...",
    "cute-flash: loops",
    "cute-flash: explain --cp",
]


@pytest.mark.processes
def test_a_foreign_module_called_layouts_does_not_matter(wheel: Path, tmp_path: Path) -> None:
    installed, names = tmp_path / "installed", ["layouts.py", "layouts/__init__.py"]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    folders = [tmp_path / "module", tmp_path / "package"]
    for folder, name in zip(folders, names):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(f"NAME = {name!r}\n")
    code = f"FOLDER, FOREIGN = {str(installed)!r}, {list(map(str, folders))!r}\n{IMPORT}"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert sorted(done.stdout.splitlines()) == [f"imported beside {name}" for name in names], done.stderr
    assert all(done.stderr.count(message) == len(names) for message in MISSING)
