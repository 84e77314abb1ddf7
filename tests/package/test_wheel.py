"""The wheel and the source distribution: their contents, the links of the README, and the import of the wheel beside
foreign modules named like folders of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile",
    "constraints.txt", "compose.yaml", "mkdocs.yml", ".dockerignore", ".pre-commit-config.yaml",
)  # fmt: skip
REPOSITORY = "https://example.org/team/cute_flash"
FOLDERS = ("cute_flash", "docker", "docs", "examples", "layouts", "profiling", "tests")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository without results, because setuptools writes into the source folder."""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results", "reports"))
    return source


def built(source: Path, kind: str, **environment: str) -> Path:
    """The archive that `python -m build` makes."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(source / kind)]
    inherited = {name: x for name, x in os.environ.items() if name != "CUTE_FLASH_REPOSITORY"}
    done = subprocess.run([*command, str(source)], env={**inherited, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (source / kind).iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return built(source, "wheel", CUTE_FLASH_REPOSITORY=REPOSITORY)


def links(description: str) -> list[str]:
    """The targets of links and images, also of those in HTML and of definitions."""
    inline = re.findall(r"\]\(([^)\s]+)\)", description)
    html = re.findall(r"(?:href|src)=[\"']([^\"']+)", description)
    return [*inline, *html, *re.findall(r"^\[[^]]+\]: (\S+)", description, re.MULTILINE)]


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
    targets = links(headers.get_payload())
    assert any(target.startswith(f"{REPOSITORY}/raw/HEAD/") and target.endswith(".svg") for target in targets)
    assert len(targets) == len(links((ROOT / "README.md").read_text(encoding="utf-8")))
    assert all(target.startswith("https://") for target in targets)


@pytest.mark.slow
def test_the_sdist_has_what_tests_and_documents_need(source: Path, tmp_path: Path) -> None:
    with tarfile.open(built(source, "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    for folder in FOLDERS:
        files = {str(path.relative_to(source)) for path in (source / folder).rglob("*") if path.is_file()}
        assert {path for path in files if not (unpacked / path).exists()} == set()
    assert all((unpacked / name).exists() for name in FILES)
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/test_bad_input.py", "tests/spec"],
        cwd=unpacked, capture_output=True, text=True,
    )  # fmt: skip
    assert collected.returncode == 0, collected.stdout
    # Built without the address of the repository: no link that a package index cannot follow.
    metadata = message_from_string((unpacked / "PKG-INFO").read_text(encoding="utf-8"))
    description = metadata.get_payload()
    assert "All numbers" in description and metadata.get_all("Project-URL") is None
    assert all(target.startswith("https://") for target in links(description))


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
