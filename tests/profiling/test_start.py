from __future__ import annotations

from profiling.studies import start
from profiling.studies.host_report import start_table

STUB = """
import os, pathlib, time
cache = pathlib.Path(os.environ["CUTE_FLASH_CACHE_DIR"]) / "kernel.o"
compiled = False
def attn(q, k, v):
    global compiled
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
def randn(*size, device):
    return Tensor()
"""


def test_cold_and_warm_start_of_fresh_processes(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "cute_flash.py").write_text(STUB)
    found = start.start_times("cpu", packages=tmp_path)
    assert set(found) == {"cold", "warm"}, found
    assert found["cold"]["first_call_ms"] >= 300 > found["warm"]["first_call_ms"]
    assert found["cold"]["second_call_ms"] < 300 and found["warm"]["import_ms"] < 300


def test_the_kernel_family_reaches_the_fresh_process(tmp_path, monkeypatch):
    monkeypatch.delenv("CUTE_FLASH_KERNELS", raising=False)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "cute_flash.py").write_text("import os\nraise ImportError(os.environ['CUTE_FLASH_KERNELS'])")
    assert start.start_times("cpu", "sm80", tmp_path)["error"].endswith("ImportError: sm80")
    assert start.start_times("cpu", "auto", tmp_path)["error"].endswith("KeyError: 'CUTE_FLASH_KERNELS'")


def test_a_start_that_fails_tells_why(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "cute_flash.py").write_text("raise ImportError('no driver')")
    assert start.start_times("cpu", packages=tmp_path) == {"error": "ImportError: no driver"}


def test_the_table_has_a_row_for_each_state_of_the_cache():
    steps = {"import_ms": 40.0, "first_call_ms": 2500.0, "second_call_ms": 0.1}
    table = start_table({"cold": steps, "warm": {**steps, "first_call_ms": 30.0}})
    assert table.columns == ("compile cache", "import", "first call", "second call")
    assert table.rows == (("cold", "40", "2500", "0"), ("warm", "40", "30", "0"))
