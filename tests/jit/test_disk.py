"""The folder of compiled kernels: only complete entries of the same user are read, and one process writes at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cute_flash.jit import disk
from cute_flash.jit.disk import CacheWarning, DiskCache

CONTENT = bytes(range(256)) * 16


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    return DiskCache(folder)


def default_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> DiskCache:
    monkeypatch.setenv("CUTE_FLASH_CACHE_DIR", str(folder))
    return DiskCache.default()


# Entries


@pytest.mark.parametrize("suffix", [".so", ".o"])
def test_store_and_find(cache: DiskCache, suffix: str) -> None:
    assert cache.find("entry", suffix) is None
    path = cache.store("entry", CONTENT, suffix)
    assert path == cache.folder / f"entry{suffix}"
    assert cache.find("entry", suffix) == path
    assert path.read_bytes() == CONTENT
    assert cache.find("entry", ".so" if suffix == ".o" else ".o") is None
    assert cache.find("other", suffix) is None


def test_files_are_for_their_user_alone(cache: DiskCache) -> None:
    path = cache.store("entry", CONTENT, ".so")
    for file in (path, path.with_name("entry.so.sha256")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_new_entry_replaces_the_old_one(cache: DiskCache) -> None:
    cache.store("entry", CONTENT, ".so")
    with open(cache.folder / "entry.so", "rb") as old:
        cache.store("entry", b"new", ".so")
        # A process that has the old entry open can still read it.
        assert old.read() == CONTENT
    found = cache.find("entry", ".so")
    assert found is not None
    assert found.read_bytes() == b"new"


def flipped(content: bytes) -> bytes:
    return content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(CONTENT[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(flipped(CONTENT)),
        lambda path: path.write_bytes(CONTENT + b"\0"),
        lambda path: path.unlink(),
        lambda path: path.with_name(path.name + ".sha256").unlink(),
        lambda path: path.with_name(path.name + ".sha256").write_text("0" * 64),
        lambda path: path.with_name(path.name + ".sha256").write_text(""),
        lambda path: path.with_name(path.name + ".sha256").write_bytes(b"\xff\xfe"),
    ],
    ids=["truncated", "emptied", "flipped", "grown", "gone", "no sum", "wrong sum", "empty sum", "binary sum"],
)
def test_a_damaged_entry_is_a_miss_and_can_be_written_again(cache: DiskCache, damage) -> None:
    path = cache.store("entry", CONTENT, ".so")
    damage(path)
    assert cache.find("entry", ".so") is None
    assert cache.find("entry", ".so") is None
    cache.store("entry", CONTENT, ".so")
    assert cache.find("entry", ".so") == path


Spoil = Callable[[Path, pytest.MonkeyPatch], object]


def someone_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)


def with_mode(mode: int) -> Spoil:
    return lambda path, _: path.chmod(mode)


def moved_behind_a_link(path: Path, _: pytest.MonkeyPatch) -> None:
    path.symlink_to(path.rename(path.parents[1] / path.name))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        *(
            (with_mode(mode), f"is writable by others \\(mode {mode:o}; chmod go-w it\\)")
            for mode in (0o620, 0o602, 0o666)
        ),
        (someone_else, f"belongs to user {os.getuid()}"),
        (moved_behind_a_link, "is a symbolic link"),
    ],
    ids=["group", "others", "both", "owner", "link"],
)
def test_an_entry_that_is_not_private_is_ignored_with_a_warning(
    cache: DiskCache, spoil: Spoil, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache.store("entry", CONTENT, ".so")
    spoil(path, monkeypatch)
    with pytest.warns(CacheWarning, match=rf"entry\.so {problem}; ignored"):
        assert cache.find("entry", ".so") is None


def test_entries_and_clear(cache: DiskCache) -> None:
    assert cache.files() == []
    names = ["b.so", "a.so", "c.o"]
    for name in names:
        cache.store(name.partition(".")[0], CONTENT, name[1:])
    with cache.locked("a"):
        assert [path.name for path in cache.files()] == sorted(names)
    cache.clear()
    assert cache.files() == []
    assert list(cache.folder.glob("*.sha256")) == []
    cache.clear()


# The folder


def test_the_folder_is_made_with_its_parents_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "some" / "where" / "kernels"
    before = os.umask(0o022)
    try:
        found = default_in(folder, monkeypatch)
    finally:
        os.umask(before)
    assert found == DiskCache(folder, is_persistent=True)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []


def test_without_a_variable_it_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_FLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert DiskCache.default().folder == tmp_path / "xdg" / "cute_flash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert DiskCache.default().folder == tmp_path / "home" / ".cache" / "cute_flash"


def a_file(path: Path, _: pytest.MonkeyPatch) -> None:
    path.rmdir()
    path.write_text("not a folder")


def below_a_file(path: Path, _: pytest.MonkeyPatch) -> None:
    path.rmdir()
    path.parent.rmdir()
    path.parent.write_text("not a folder")


def not_writable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission bits do not stop root, and tests in containers run as root."""

    def refuse(dir: Path | None = None) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", refuse)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (a_file, "cannot be used .* for this process only"),
        (below_a_file, "cannot be used .* for this process only"),
        (not_writable, "cannot be used .*Permission denied"),
        *((with_mode(mode), rf"is writable by others \(mode {mode:o}") for mode in (0o777, 0o770, 0o1777)),
        (someone_else, f"belongs to user {os.getuid()}"),
    ],
    ids=["file", "below a file", "not writable", "all", "group", "sticky", "owner"],
)
def test_a_folder_that_is_not_private_is_replaced_for_this_process(
    tmp_path: Path, spoil: Spoil, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "parent" / "kernels"
    folder.mkdir(parents=True)
    with monkeypatch.context() as patch:
        spoil(folder, patch)
        with pytest.warns(CacheWarning, match=rf"kernel cache:? {folder} {problem}"):
            found = default_in(folder, patch)
        # The second call gives no warning and the same folder.
        assert DiskCache.default() == found
    assert not found.is_persistent and found.folder != folder
    assert stat.S_IMODE(found.folder.stat().st_mode) == 0o700
    path = found.store("entry", CONTENT, ".so")
    assert found.find("entry", ".so") == path


def test_a_folder_behind_a_link_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "big_disk"
    real.mkdir(mode=0o700)
    (tmp_path / "kernels").symlink_to(real)
    found = default_in(tmp_path / "kernels", monkeypatch)
    assert found.is_persistent
    found.store("entry", CONTENT, ".so")
    assert (real / "entry.so").read_bytes() == CONTENT


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    default_in(folder, monkeypatch)
    folder.rmdir()
    with DiskCache.default().locked("entry"):
        DiskCache.default().store("entry", CONTENT, ".so")
    assert DiskCache.default().find("entry", ".so") == folder / "entry.so"


def test_a_substitute_ends_with_its_process(tmp_path: Path) -> None:
    blocked = tmp_path / "kernels"
    blocked.write_text("")
    # Import the module without its package, which would import torch.
    program = (
        "import runpy, sys\n"
        "cache = runpy.run_path(sys.argv[1])['DiskCache'].default()\n"
        "cache.store('entry', b'content', '.so')\n"
        "print(cache.folder)"
    )
    environment = {**os.environ, "CUTE_FLASH_CACHE_DIR": str(blocked), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, disk.__file__],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path
    assert not folder.exists()


# Locks


def test_one_holder_at_a_time(cache: DiskCache) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with cache.locked("entry"):
            with guard:
                inside += 1
                most = max(most, inside)
            time.sleep(0.02)
            with guard:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_other_entries_are_not_held_up_and_errors_let_go(cache: DiskCache) -> None:
    with cache.locked("one"), cache.locked("two"):
        pass
    with pytest.raises(RuntimeError, match="builder"), cache.locked("one"):
        raise RuntimeError("builder")
    with cache.locked("one"):
        pass
