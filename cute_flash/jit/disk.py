"""The disk cache of compiled kernels: locked across processes, written atomically, trusted only if private.

An entry is code that will be executed. It is used only if the folder and the file belong to this user, no other user
can write to them, and the content matches the stored checksum.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Suffixes of shared objects, and of object files (from a machine without a linker).
SUFFIXES = (".so", ".o")
# Suffix of the resources that `jit.resources` reads from a kernel's machine code.
RESOURCES = ".resources"


class CacheWarning(UserWarning):
    """An entry or a folder of the kernel cache was ignored."""


@dataclass(frozen=True)
class DiskCache:
    """A folder of entries, each with a checksum file beside it."""

    folder: Path
    is_persistent: bool = True  # False: a temporary folder of this process

    @staticmethod
    def default() -> DiskCache:
        """The cache in `CUTE_FLASH_CACHE_DIR`, else in the user's cache folder, else in a private temporary folder."""
        user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return DiskCache.at(os.environ.get("CUTE_FLASH_CACHE_DIR") or os.path.join(user_cache, "cute_flash"))

    @staticmethod
    def at(name: str) -> DiskCache:
        """The cache in a folder, which is made; in a private temporary folder if that one cannot be used."""
        if not _usable(name).folder.is_dir():
            # The folder was deleted while this process ran.
            _usable.cache_clear()
        return _usable(name)

    def find(self, name: str, suffix: str) -> Path | None:
        """The path of an entry; None if it is missing, not private, or does not match its checksum."""
        path = self.folder / (name + suffix)
        try:
            if not _is_private(path, path.lstat()):
                return None
            expected = path.with_name(path.name + ".sha256").read_text()
            return path if hashlib.sha256(path.read_bytes()).hexdigest() == expected else None
        except (OSError, UnicodeDecodeError):
            return None

    def store(self, name: str, content: bytes, suffix: str) -> Path:
        """Write an entry atomically, so that a reader sees all of it or nothing."""
        path = self.folder / (name + suffix)
        self._replace(path, content)
        self._replace(path.with_name(path.name + ".sha256"), hashlib.sha256(content).hexdigest().encode())
        return path

    def _replace(self, path: Path, content: bytes) -> None:
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".new_")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Lock an entry across processes: one builds it, the others wait and then find it."""
        with open(self.folder / f"{name}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.suffix in SUFFIXES)

    def contents(self) -> str:
        """Number and size of the kernels, as text."""
        files = self.files()
        return f"{len(files)} kernel(s), {sum(path.stat().st_size for path in files) / 1e6:.1f} MB"

    def clear(self) -> None:
        """Delete all kernels, and their stored resources."""
        for path in [*self.files(), *self.folder.glob(f"*{RESOURCES}")]:
            path.with_name(path.name + ".sha256").unlink(missing_ok=True)
            path.unlink(missing_ok=True)


@cache
def _usable(folder: str) -> DiskCache:
    """The cache in a folder or, if that cannot be used or is not private, in a temporary folder of this process."""
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        if _is_private(path, path.stat()):
            return DiskCache(path)
    except OSError as error:
        message = f"kernel cache {folder} cannot be used ({error}); compiling for this process only"
        warnings.warn(message, CacheWarning, stacklevel=3)
    private = tempfile.mkdtemp(prefix="cute_flash_")
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return DiskCache(Path(private), is_persistent=False)


def _is_private(path: Path, status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user and only this user can write to it; warn if not."""
    if stat.S_ISLNK(status.st_mode):
        problem = "is a symbolic link"
    elif status.st_uid != os.getuid():
        problem = f"belongs to user {status.st_uid}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"is writable by others (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w it)"
    else:
        return True
    warnings.warn(f"kernel cache: {path} {problem}; ignored", CacheWarning, stacklevel=3)
    return False
