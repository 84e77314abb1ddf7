"""Digest of a cubin: machine code and launch attributes, without the kernel's name."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator

# Machine code, launch attributes (registers, parameters, barriers) and constant banks. The name of a section of one
# kernel ends with the kernel's symbol; the name of a section of the cubin does not.
_LOCKED = re.compile(r"(\.text|\.nv\.info|\.nv\.constant\d*)(\..+)?")
_NOBITS = 8  # the type of a section without contents in the file


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and contents of every section of a 64-bit little-endian ELF file."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"not a 64-bit little-endian ELF file: it begins with {cubin[:6]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _flags, _address, offset, size in headers:
        begin = names + name
        end = cubin.index(b"\0", begin)
        yield cubin[begin:end].decode(), b"" if kind == _NOBITS else cubin[offset : offset + size]


def kernel_sections(cubin: bytes) -> list[tuple[str, bytes]]:
    """Machine code and constant banks (parameters) of the cubin's kernels: kinds of sections and contents, sorted.

    `.nv.info` is left out, because it has indices of symbols in the cubin.
    """
    matches = [(_LOCKED.fullmatch(name), contents) for name, contents in sections(cubin)]
    return sorted((m[1], contents) for m, contents in matches if m is not None and m[2] and m[1] != ".nv.info")


def digest(cubin: bytes) -> str:
    """sha256 of the locked sections; the same for the same kernel under another name."""
    found = []
    for name, contents in sections(cubin):
        match = _LOCKED.fullmatch(name)
        if match is not None:
            stripped = match[1] + (".*" if match[2] else "")
            found.append(f"{stripped} {hashlib.sha256(contents).hexdigest()}")
    if not any(line.startswith(".text.* ") for line in found):
        raise ValueError("no kernel in the cubin")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()
