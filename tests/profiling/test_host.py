from __future__ import annotations

import gc
import json

import torch

from profiling import host
from profiling.timing import Contender
from tests.profiling.fakes import FakeProvider, FakeTimer

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


def test_host_time_is_the_median_of_warm_repeats_without_the_synchronisation():
    timer, order = FakeTimer(), []

    class WaitingTimer(FakeTimer):
        def synchronize(self) -> None:
            # The GPU is far behind: none of this may be counted.
            timer.now_ms += 1000.0

    def contender(name: str, call_ms: float) -> Contender:
        def call() -> None:
            order.append(name)
            # The first call compiles.
            timer.now_ms += call_ms if order.count(name) > 1 else 5000.0

        return Contender(call)

    contenders = {"a": contender("a", 0.010), "b": contender("b", 0.030)}
    found, errors = host.host_times(
        contenders, WaitingTimer(), lambda: timer.now_ms / 1e3, calls=4, repeats=3
    )
    assert errors == {}
    assert [round(found[name].median_us, 3) for name in "ab"] == [10.0, 30.0]
    assert len(found["a"].repeat_us) == 3
    # One call before each loop of four, in rotating order.
    assert order == list("aaaaabbbbbbbbbbaaaaaaaaaabbbbbbbbbbaaaaa")
    assert gc.isenabled()


def test_one_that_fails_leaves():
    timer = FakeTimer()

    def fail() -> None:
        raise RuntimeError("no kernel")

    contenders = {"bad": Contender(fail), "good": Contender(lambda: None)}
    found, errors = host.host_times(contenders, timer, lambda: 0.0, calls=2, repeats=2)
    assert list(found) == ["good"] and errors == {"bad": "RuntimeError: no kernel"}


def test_cold_and_warm_start_of_fresh_processes(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "cute_flash.py").write_text(STUB)
    found = host.start_times("cpu", search_path=tmp_path)
    assert set(found) == {"cold", "warm"}, found
    assert found["cold"]["first_call_ms"] >= 300 > found["warm"]["first_call_ms"]
    assert found["cold"]["second_call_ms"] < 300 and found["warm"]["import_ms"] < 300


def test_the_kernel_family_reaches_the_fresh_process(tmp_path, monkeypatch):
    monkeypatch.delenv("CUTE_FLASH_KERNELS", raising=False)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "cute_flash.py").write_text("import os\nraise ImportError(os.environ['CUTE_FLASH_KERNELS'])")
    assert host.start_times("cpu", "sm80", tmp_path)["error"].endswith("ImportError: sm80")
    assert host.start_times("cpu", "auto", tmp_path)["error"].endswith("KeyError: 'CUTE_FLASH_KERNELS'")


def test_a_start_that_fails_tells_why(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "cute_flash.py").write_text("raise ImportError('no driver')")
    assert host.start_times("cpu", search_path=tmp_path) == {"error": "RuntimeError: ImportError: no driver"}


def test_a_whole_run_is_json_and_tables(monkeypatch):
    monkeypatch.setattr(host, "CALLS", 3)
    monkeypatch.setattr(host, "REPEATS", 2)
    timer = FakeTimer()
    providers = [FakeProvider("cute_flash", timer, is_ours=True), FakeProvider("fa3", timer)]
    steps = {"import_ms": 40.0, "first_call_ms": 2500.0, "second_call_ms": 0.1}
    data = host.run_host(
        providers,
        {"fa4": "no module"},
        timer,
        torch.device("cpu"),
        start=lambda: {"cold": steps, "warm": {**steps, "first_call_ms": 30.0}},
    )
    assert json.loads(json.dumps(data))["unavailable"] == {"fa4": "no module"}
    times, starts, profile = host.host_tables(data)
    assert [row[0] for row in times.rows] == ["cute_flash", "fa3"]
    assert starts.rows == (("cold", "40", "2500", "0"), ("warm", "40", "30", "0"))
    assert any("clone" in row[0] for row in profile.rows)
