"""`cute-flash pack`: build a wheel of compiled kernels, which are found before the compiler is called.

The wheel holds the objects of our kernels and no library of other projects. Its format is that of PEP 427, written with
the standard library. Equal objects make an equal wheel: names are sorted and times are fixed.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import zipfile
from collections.abc import Sequence
from pathlib import Path

from cute_flash.errors import InstallationError
from cute_flash.jit.compile import LINKERS, linker
from cute_flash.jit.digest import build_facts, digest
from cute_flash.jit.disk import DiskCache
from cute_flash.jit.pack import DISTRIBUTION, MANIFEST, PACKAGE, SUFFIX, Manifest
from cute_flash.planning.launch import LaunchKey
from cute_flash.tools.precompile import precompile_keys
from cute_flash.version import __version__

# Objects need no library but those of nvidia-cutlass-dsl, whose wheels have this tag.
PLATFORM = "manylinux_2_28"
# The earliest time that a zip file can hold.
TIME = (1980, 1, 1, 0, 0, 0)
MODULE = '"""Compiled kernels of cute_flash: data only. `manifest.json` lists them."""\n'


def build_pack(keys: Sequence[LaunchKey], work: DiskCache, out: Path, jobs: int) -> Path:
    """Compile kernels into `work`, as far as it does not have them, and write their wheel into the folder `out`."""
    if linker() is None:
        raise InstallationError(f"a pack needs a linker, one of {', '.join(LINKERS)}: apt install binutils")
    precompile_keys(keys, jobs, work)
    objects: dict[str, dict[str, bytes]] = {}
    for key in keys:
        path = work.find(digest(key), SUFFIX)
        if path is None:
            # An earlier run without a linker stored an object file, or the folder was changed.
            raise FileNotFoundError(f"{work.folder} lacks {digest(key)}{SUFFIX}: delete the folder, and run again")
        objects.setdefault(key.target, {})[digest(key)] = path.read_bytes()
    return write_wheel(objects, out)


def write_wheel(objects: dict[str, dict[str, bytes]], out: Path) -> Path:
    """Write the wheel of some objects, by target and digest."""
    tag = f"py3-none-{PLATFORM}_{platform.machine()}"
    sums = {
        target: {name: hashlib.sha256(content).hexdigest() for name, content in of_target.items()}
        for target, of_target in objects.items()
    }
    files = {
        f"{PACKAGE}/__init__.py": MODULE.encode(),
        f"{PACKAGE}/{MANIFEST}": Manifest(__version__, build_facts(), sums).to_json().encode(),
    }
    for target, of_target in objects.items():
        files |= {f"{PACKAGE}/{target}/{name}{SUFFIX}": content for name, content in of_target.items()}
    info = f"{PACKAGE}-{__version__}.dist-info"
    files = dict(sorted(files.items()))
    files[f"{info}/METADATA"] = _metadata(sorted(objects)).encode()
    files[f"{info}/WHEEL"] = _headers(
        ("Wheel-Version", "1.0"), ("Generator", f"cute-flash {__version__}"), ("Root-Is-Purelib", "false"), ("Tag", tag)
    ).encode()
    record = f"{info}/RECORD"
    rows = [f"{name},{_record_sum(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*rows, f"{record},,", ""]).encode()

    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{PACKAGE}-{__version__}-{tag}.whl"
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, TIME)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            archive.writestr(entry, content)
    part.replace(wheel)
    return wheel


def _metadata(targets: Sequence[str]) -> str:
    headers = _headers(
        ("Metadata-Version", "2.1"),
        ("Name", DISTRIBUTION),
        ("Version", __version__),
        ("Summary", f"Compiled kernels of cute-flash for {', '.join(targets)}"),
        ("License", "Apache-2.0"),
        ("Requires-Dist", f"cute-flash=={__version__}"),
    )
    return f"{headers}\ncute-flash finds these kernels before it compiles. `cute-flash doctor` describes the package.\n"


def _headers(*pairs: tuple[str, str]) -> str:
    return "".join(f"{name}: {value}\n" for name, value in pairs)


def _record_sum(content: bytes) -> str:
    """The checksum of a file as RECORD has it: base64 for addresses, without padding."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
