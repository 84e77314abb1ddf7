from __future__ import annotations

import zipfile

from profiling.studies import start
from profiling.studies.host_report import start_table

STUB = """
import os, pathlib, time
cache = pathlib.Path(os.environ["CUTE_FLASH_CACHE_DIR"]) / "kernel.o"
compiled = False
def attn(q, k, v):
    global compiled
    try:
        import cute_flash_kernels
    except ImportError:
        if not compiled and not cache.exists():
            time.sleep(0.3)
            cache.write_text("compiled")
    compiled = True
    return q
"""


# Instead of the real one, which takes seconds to import.
TORCH = """
bfloat16 = None
class Tensor:
    def to(self, dtype):
        return self
    requires_grad_ = sum = __mul__ = lambda self, *other: self
    def backward(self):
        pass
def randn(*size, device):
    return Tensor()
"""


def test_cold_and_warm_start_of_fresh_processes(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "cute_flash.py").write_text(STUB)
    found = start.start_times("cpu", packages=tmp_path)
    assert set(found) == {"cold", "warm"}, found
    assert not found["cold"]["imports_compiler"]
    assert found["cold"]["first_call_ms"] >= 300 > found["warm"]["first_call_ms"]
    assert found["cold"]["second_call_ms"] < 300 and found["warm"]["import_ms"] < 300


def test_a_start_with_a_pack_and_an_empty_cache(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "cute_flash.py").write_text(STUB)
    wheel = tmp_path / "kernels.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("cute_flash_kernels/__init__.py", "")
        # Processes with a pack import from its folder first, and from no other.
        archive.write(tmp_path / "torch.py", "torch.py")
        archive.write(tmp_path / "cute_flash.py", "cute_flash.py")
    found = start.start_times("cpu", pack=wheel, packages=tmp_path)
    assert set(found) == {"cold", "warm", "pack"}, found
    assert found["pack"]["first_call_ms"] < 300 <= found["cold"]["first_call_ms"]
    missing = start.start_times("cpu", pack=tmp_path / "none.whl", packages=tmp_path)
    assert "none.whl" in missing["error"]


def test_the_kernel_family_reaches_the_fresh_process(tmp_path, monkeypatch):
    monkeypatch.delenv("CUTE_FLASH_KERNELS", raising=False)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "cute_flash.py").write_text("import os\nraise ImportError(os.environ['CUTE_FLASH_KERNELS'])")
    assert start.start_times("cpu", "sm80", packages=tmp_path)["error"].endswith("ImportError: sm80")
    assert start.start_times("cpu", "auto", packages=tmp_path)["error"].endswith("KeyError: 'CUTE_FLASH_KERNELS'")


def test_a_start_that_fails_tells_why(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "cute_flash.py").write_text("raise ImportError('no driver')")
    assert start.start_times("cpu", packages=tmp_path) == {"error": "ImportError: no driver"}


def test_the_table_has_a_row_for_each_state_of_the_cache():
    steps = {"import_ms": 40.0, "first_call_ms": 2500.0, "second_call_ms": 0.1, "imports_compiler": True}
    table = start_table({"cold": steps, "warm": {**steps, "first_call_ms": 30.0}})
    assert table.columns == ("kernels from", "import", "first call", "second call")
    assert table.rows == (("empty cache", "40", "2500", "0"), ("filled cache", "40", "30", "0"))
