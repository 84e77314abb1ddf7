"""The installed pack of compiled kernels: the package `cute_flash_kernels`, which `cute-flash pack` builds.

The package has a folder of objects (`<digest>.so`) for each target of the compiler, and `manifest.json`: the versions
and sources with which the objects were built, and the sha256 of each object. Objects are loaded where they are. They
are trusted like the code of any installed package; the sha256 finds truncated and altered files.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

from cute_flash.jit.digest import build_facts

PACKAGE = "cute_flash_kernels"
DISTRIBUTION = "cute-flash-kernels"
MANIFEST = "manifest.json"
FORMAT = 1  # of the manifest
SUFFIX = ".so"
# Names of the facts of `build_facts` in messages.
FACTS = {
    "sources": "the sources of cute_flash",
    "dsl": "nvidia-cutlass-dsl",
    "tvm_ffi": "apache-tvm-ffi",
    "flavour": "the CUDA flavour of the DSL",
    "host": "the host",
}

logger = logging.getLogger("cute_flash.pack")


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    version: str  # of cute_flash
    facts: dict[str, str]  # `build_facts` of the installation that built it
    objects: dict[str, dict[str, str]]  # for each target, the sha256 of each object by digest
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @staticmethod
    def of_json(text: str) -> Manifest:
        """Raise a `ValueError` if the text is not a manifest of this format."""
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"not a manifest of format {FORMAT}")
        try:
            return Manifest(**content)
        except TypeError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Pack:
    """A pack in a folder."""

    folder: Path
    manifest: Manifest

    def find(self, target: str, name: str) -> Path | None:
        """The path of an object; None if the pack does not have it, or, with a log line, if it is damaged."""
        expected = self._objects(target).get(name)
        if expected is None:
            return None
        path = self.folder / target / (name + SUFFIX)
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() == expected:
                return path
            problem = "it was truncated or altered"
        except OSError as error:
            problem = str(error)
        logger.warning("%s is not used (%s); pip install --force-reinstall %s", path, problem, DISTRIBUTION)
        return None

    def _objects(self, target: str) -> dict[str, str]:
        if target not in self.manifest.objects:
            _log_once(f"{self.name} has kernels for {self.targets}, none for {target}, which are compiled instead")
        return self.manifest.objects.get(target, {})

    @property
    def name(self) -> str:
        return f"{DISTRIBUTION} {self.manifest.version}"

    @property
    def targets(self) -> str:
        return ", ".join(sorted(self.manifest.objects))

    def contents(self) -> str:
        """Number and targets of the kernels, as text."""
        return f"{sum(map(len, self.manifest.objects.values()))} kernel(s) for {self.targets}"

    @cached_property
    def difference(self) -> str:
        """How the pack was built differently from what this installation would compile; empty if it matches."""
        ours, theirs = build_facts(), self.manifest.facts
        differing = [name for name in FACTS if ours[name] != theirs.get(name)]
        texts = {name: f"{FACTS[name]} {theirs.get(name)} instead of {ours[name]}" for name in differing}
        if "sources" in differing:
            texts["sources"] = f"{FACTS['sources']} differ"
        return ", ".join(texts.values())


@cache
def _log_once(message: str) -> None:
    logger.warning("%s", message)


@cache
def installed_pack() -> Pack | None:
    """The installed pack, whether or not it matches this installation; None, with a log line, if it is unreadable."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        return Pack(folder, Manifest.of_json((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        logger.warning("%s is not used: %s; pip install --force-reinstall %s", folder, error, DISTRIBUTION)
        return None


@cache
def matching_pack() -> Pack | None:
    """The installed pack, if this installation would compile the same objects; a log line says if not."""
    pack = installed_pack()
    if pack is None or not pack.difference:
        return pack
    logger.warning("%s is not used: it was built with %s; kernels are compiled instead", pack.name, pack.difference)
    return None


def find(target: str, name: str) -> Path | None:
    """The path of an object in the installed pack."""
    pack = matching_pack()
    return None if pack is None else pack.find(target, name)
