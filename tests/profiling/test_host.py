from __future__ import annotations

import gc
import json
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import cute_flash
from cute_flash.planning.plan import CompileKey
from cute_flash.runtime import gpu
from cute_flash.spec import arch
from cute_flash.spec.arch import ARCHS
from profiling import __main__ as cli
from profiling.measure import host_time, launches, study
from profiling.measure.machine import ROOT
from profiling.measure.shapes import Shape
from profiling.measure.study import FAILED, NOT_MEASURED, OK
from profiling.measure.timing import TimedCall
from profiling.measure.workers import TaskFailed
from profiling.studies import host
from profiling.studies.host_cases import CASES, MADE_BY_TORCH, Case, Goal, Settings, timed_call
from profiling.studies.host_report import FLOOR, OURS, Times, case_record, host_tables
from tests.profiling.fakes import CpuGpu, FakeTimer, tools

TINY_TOKEN = Shape(batch=1, heads=4, heads_kv=2, seqlen=64, head_dim=16, causal=False)
TINY = Shape(batch=2, heads=2, heads_kv=2, seqlen=16, head_dim=16, causal=False)


def settings(*cases: str, **fields: Any) -> Settings:
    return Settings(
        cases=cases, processes=2, calls=2, repeats=1, shape=TINY, one_token_shape=TINY_TOKEN, device="cpu", **fields
    )


def measured(monkeypatch, one: Callable[..., Times], *cases: str, **fields: Any) -> Any:
    """The record of a study whose processes are calls of a function in this process."""
    monkeypatch.setattr(host, "in_fresh_process", one)
    return host.STUDY.measure(settings(*cases, **fields), tools(FakeTimer()))


# ---- statistics
# ---------------------------------------------------------------------------------------------------------


def test_host_time_is_the_median_of_warm_loops_without_the_synchronisation():
    timer, calls = FakeTimer(), []

    class WaitingTimer(FakeTimer):
        def synchronize(self) -> None:
            # The GPU lags behind; this time must not be counted.
            timer.now_ms += 1000.0

    def counting(name: str, call_ms: tuple[float, ...]) -> TimedCall:
        def call() -> None:
            calls.append(name)
            loop = calls.count(name) // 5 - 1
            # The first loop compiles.
            timer.now_ms += call_ms[loop] if loop >= 0 else 5000.0

        return TimedCall(call)

    timed_calls = {("x", "a"): counting("a", (0.010,) * 9), ("x", "b"): counting("b", (0.030,) * 9)}
    seconds = lambda: timer.now_ms / 1e3  # noqa: E731
    times = host_time.host_times(timed_calls, WaitingTimer(), seconds, 4, 5, random.Random(0))
    assert times.errors == {}
    assert {side: round(us, 3) for (_, side), us in times.us.items()} == {"a": 10.0, "b": 30.0}
    # One call before each loop of four; each timed_call once a round, in changing order.
    rounds = [calls[i : i + 10 : 5] for i in range(0, len(calls), 10)]
    assert len(rounds) == 6 and all(sorted(names) == ["a", "b"] for names in rounds)
    assert ["a", "b"] in rounds and ["b", "a"] in rounds
    assert gc.isenabled()


def test_a_call_that_fails_is_left_out():
    def fail() -> None:
        raise RuntimeError("no kernel")

    timed_calls = {("x", "bad"): TimedCall(fail), ("x", "good"): TimedCall(lambda: None)}
    times = host_time.host_times(timed_calls, FakeTimer(), lambda: 0.0, 2, 2, random.Random(0))
    assert list(times.us) == [("x", "good")] and times.errors == {("x", "bad"): "RuntimeError: no kernel"}


def test_a_case_is_compared_by_the_medians_of_its_processes():
    case, sides = Case(), (OURS, FLOOR, "sdpa-flash", "sdpa-cudnn")
    of_processes = [(20, 10, 30, 26), (11, 9, 28, 22), (12, 8, 27, 25), (13, 9, 29, 21), (14, 9, 25, 24)]
    processes = [Times({(case.name, s): us for s, us in zip(sides, one)}) for one in of_processes]
    found = case_record(case, processes, {})
    assert [found["sides"][side]["median_us"] for side in sides] == [13, 9, 28, 24]
    assert found["fastest_sdpa"] == "sdpa-cudnn"
    assert found["over_floor_us"] == 4 and found["ratio"] == 13 / 24 and found["over_plain"] == 1.0


@pytest.mark.parametrize(
    ("goal", "base", "is_met"),
    [
        (Goal(over_floor_us=6.0, of_sdpa=0.75), None, True),
        (Goal(over_floor_us=5.9, of_sdpa=0.75), None, False),
        (Goal(over_floor_us=6.0, of_sdpa=0.7), None, False),
        (Goal(is_as_base=True), 0.72, True),
        (Goal(is_as_base=True), 0.71, False),
        (Goal(us=15.0, of_plain=1.5), None, True),
        (Goal(us=14.9), None, False),
        (Goal(of_plain=1.49), None, False),
        # A case without goals does not fail.
        (Goal(is_as_base=True), None, None),
    ],
)
def test_goals(goal, base, is_met):
    case, us = Case("softcap", goal=goal), {OURS: 15.0, FLOOR: 9.0, "sdpa-flash": 20.0}
    times = Times({**{("softcap-fwd", name): value for name, value in us.items()}, ("plain-fwd", OURS): 10.0})
    earlier = {"cases": {"softcap-fwd": {"ratio": base}}}
    assert case_record(case, [times], earlier)["is_met"] is is_met


def test_a_missing_measurement_misses_its_goal_but_that_of_the_plain_call():
    times = Times({("softcap-fwd", OURS): 15.0})
    for goal, is_met in ((Goal(over_floor_us=6.0), False), (Goal(us=15.0, of_plain=1.1), True)):
        assert case_record(Case("softcap", goal=goal), [times], {})["is_met"] is is_met


def test_the_readme_names_the_goals():
    text = (ROOT / "profiling" / "README.md").read_text(encoding="utf-8")
    goals = {case.name: case.goal for case in CASES}
    assert len(goals) == len(CASES)
    plain, train, backward = (goals[f"plain-{direction}"] for direction in ("fwd", "train", "bwd"))
    assert f"floor + {plain.over_floor_us:g} µs, and SDPA" in text and plain.of_sdpa == 1.0
    assert f"`plain-train`: forward with gradients | {train.of_sdpa:g} × SDPA |" in text
    assert f"`plain-bwd` | {backward.of_sdpa:g} × SDPA |" in text
    ratios = {name: goals[f"{name}-fwd"].of_plain for name in ("softcap", "alibi", "score_mod", "dropout")}
    assert "floor + 10 µs; softcap {softcap}, ALiBi and score_mod {alibi}, dropout {dropout}".format(**ratios) in text


# ---- floor
# ---------------------------------------------------------------------------------------------------------


Launched = list[tuple[CompileKey, dict[str, Any]]]


@pytest.fixture
def launched(monkeypatch) -> Iterator[Launched]:
    """The launches on a fake Hopper GPU whose kernels do nothing; CPU tensors claim to be on it."""
    launches: Launched = []
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: True))
    with gpu.use_gpu(CpuGpu(ARCHS["sm_90"], lambda key, operands: launches.append((key, operands)))):
        yield launches


@pytest.fixture
def allocated(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of tensors that `empty_like` allocates."""
    shapes: list[tuple[int, ...]] = []

    def empty_like(x: Tensor, real: Any = torch.empty_like, **options: Any) -> Tensor:
        shapes.append(tuple(x.shape))
        return real(x, **options)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    return shapes


def floor_of(case: Case) -> TimedCall:
    ours = timed_call(case, settings())
    made = MADE_BY_TORCH.get(case.feature)
    floor = launches.floor_of(ours, made(TINY, torch.device("cpu")) if made else None)
    assert floor is not None
    return floor


Q, LSE = (2, 2, 16, 16), (2, 2, 16)


@pytest.mark.parametrize(
    ("case", "kernels", "shapes"),
    [
        (Case(), 1, [Q, LSE]),
        (Case(direction="train"), 1, [Q, LSE]),
        (Case("alibi"), 1, [Q, LSE]),
        (Case("bias"), 1, [Q, LSE]),
        (Case("score_mod"), 1, [Q, LSE]),
        # The seed and the largest logits are made by torch, not allocated beforehand.
        (Case("dropout"), 1, [Q, LSE]),
        (Case("max_logit"), 1, [Q, LSE]),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else "",
)
def test_a_floor_repeats_the_launches_and_allocates_what_the_call_allocates(launched, allocated, case, kernels, shapes):
    floor = floor_of(case)
    key, operands = launched[-1]
    launched.clear()
    allocated.clear()
    floor.call()
    assert len(launched) == kernels and launched[-1][0] == key
    assert launched[-1][1].keys() == operands.keys()
    assert all(launched[-1][1][name] is x for name, x in operands.items())
    assert sorted(allocated) == sorted(shapes)


def test_the_floor_of_a_backward_allocates_gradients_and_workspace(launched, allocated):
    floor = floor_of(Case(direction="bwd"))
    keys = [key for key, _ in launched[-3:]]
    launched.clear()
    allocated.clear()
    floor.call()
    assert [key for key, _ in launched] == keys
    assert [key.kernel for key in keys] == ["bwd_preprocess", "bwd_sm90", "bwd_postprocess_sm90"]
    # dq, dk and dv; lse_log2, delta and dq_accum, padded to tiles; dq_progress.
    assert sum(shape == Q for shape in allocated) == 3 and len(allocated) == 7


def test_the_floor_of_varlen_has_the_tile_list(launched, allocated):
    floor = floor_of(Case("varlen"))
    allocated.clear()
    floor.call()
    assert [key.kernel for key, _ in launched[-2:]] == ["varlen_scheduler_fwd", "fwd_sm90"]
    assert len(allocated) == 3


def test_torch_work_counts_in_the_floor_only_if_the_call_does_it(launched, allocated):
    made = []

    def seed() -> Tensor:
        made.append("seed")
        return torch.zeros(2, dtype=torch.int64)

    for feature, count in (("dropout", 1), ("softcap", 0)):
        floor = launches.floor_of(timed_call(Case(feature), settings()), seed)
        assert floor is not None
        made.clear()
        floor.call()
        assert len(made) == count


def test_timed_calls_do_not_run_through_the_recorder(launched):
    ours = timed_call(Case(), settings())
    ours.call()
    before, functions = gpu.current_gpu(), dict(gpu.bound)
    assert functions
    launches.floor_of(ours)
    assert gpu.current_gpu() is before and gpu.bound == functions
    with launches.recorded_launches() as recorded:
        assert not gpu.bound
    ours.call()
    assert recorded == [] and gpu.bound == functions


def test_needed_kernels_are_found_without_compiling(launched):
    cases = settings("plain-fwd", "plain-train", "plain-bwd", "softcap-fwd", "score_mod-bwd", "varlen-bwd")
    keys = host.STUDY.kernels(cases, tools(FakeTimer()))
    assert launched == []
    kernels = list(dict.fromkeys(one for key in keys for one in key.keys))
    names = [one.kernel for one in kernels]
    assert names.count("bwd_preprocess") == 2 and {"varlen_scheduler_fwd", "varlen_scheduler_bwd"} <= set(names)
    tags = {name: [one.static.tags for one in kernels if one.kernel == name] for name in ("fwd_sm90", "bwd_sm90")}
    assert sorted(tags["fwd_sm90"]) == [(), ("score_mod",), ("softcap",), ("varlen",)]
    assert sorted(tags["bwd_sm90"]) == [(), ("score_mod",), ("varlen",)]
    assert pickle.loads(pickle.dumps(keys)) == keys


def test_calls_that_differ_have_no_floor(launched):
    lengths = iter((16, 8))

    def call() -> None:
        q = torch.zeros(1, 1, next(lengths), 16, dtype=torch.bfloat16)
        cute_flash.attn(q, q, q, softcap=2.0 if len(q[0, 0]) == 8 else None)

    with pytest.raises(RuntimeError, match="different kernels"):
        launches.floor_of(TimedCall(call))


# ---- the whole run
# ---------------------------------------------------------------------------------------------------------


def test_all_cases_run_on_the_cpu():
    times = host.measure(Settings(shape=TINY, one_token_shape=TINY_TOKEN, device="cpu", calls=1, repeats=1), 0)
    ours = {case for case, side in times.us if side == OURS}
    assert ours == {case.name for case in CASES}
    # Nothing is launched, so there is no floor; cuDNN does not run there.
    assert {side for _, side in times.us} == {OURS, "sdpa-flash"}
    assert {side for _, side in times.errors} == {"sdpa-cudnn"}


def test_a_whole_run_is_json_and_tables(monkeypatch, tmp_path):
    base = tmp_path / "base.json"
    base.write_text(json.dumps({"cases": {"plain-train-function_mode": {"ratio": 1e9}}}))
    cases = "plain-fwd", "plain-train-function_mode", "softcap-bwd"
    in_this_process = lambda *args: pickle.loads(pickle.dumps(host.measure(*args)))  # noqa: E731
    data = json.loads(json.dumps(measured(monkeypatch, in_this_process, *cases, base=str(base))))
    plain, mode, softcap = data["cases"].values()
    assert plain["fastest_sdpa"] == "sdpa-flash" and len(plain["sides"][OURS]["process_us"]) == 2
    assert plain["is_met"] is False and mode["is_met"] is True and softcap["is_met"] is None
    assert host.STUDY.has_failed(data)
    table, backends = host_tables(data)
    assert table.columns == (
        "case", "cute_flash", "floor", "over floor", "SDPA (fastest)", "/ SDPA", "/ plain", "goal, at most", "ok"
    )  # fmt: skip
    assert [row[0] for row in table.rows] == list(data["cases"])
    assert [row[-1] for row in table.rows] == ["NO", "yes", "-"]
    assert table.rows[0][7] == "floor + 6, 1 x SDPA" and table.rows[0][4].endswith("(flash)")
    assert table.rows[0][6] == "1.00" and table.rows[1][6] == "-", "plain-train was not measured"
    assert {row[1] for row in backends.rows} == {"sdpa-flash"}


@pytest.mark.parametrize("feature", ["few_queries", "decode"])
def test_one_token_over_a_cache(feature):
    """All three calls compute attention of the same tensors."""
    case = Case(feature)
    ours = timed_call(case, settings()).call()
    sdpa = timed_call(case, settings(), SDPBackend.MATH).call()
    assert case.sdpa and sdpa.shape == (1, 4, 1, 16)
    torch.testing.assert_close(ours.transpose(1, 2) if feature == "decode" else ours, sdpa, atol=2e-2, rtol=2e-2)


GOOD = {("plain-fwd", OURS): 3.0, ("plain-fwd", FLOOR): 2.0, ("plain-fwd", "sdpa-flash"): 4.0}


def test_a_process_that_fails_is_reported_and_the_others_count(monkeypatch):
    def one(chosen: Settings, index: int) -> Times:
        if index == 0:
            raise TaskFailed("no message for 180 s")
        return Times(GOOD)

    data = measured(monkeypatch, one, "plain-fwd")
    assert data["errors"] == {"process 1": "no message for 180 s"}
    assert data["cases"]["plain-fwd"]["sides"][OURS]["process_us"] == [3.0]
    assert data["cases"]["plain-fwd"]["is_met"] and host.STUDY.has_failed(data)


def test_a_backend_of_sdpa_that_fails_is_no_failure_of_ours(monkeypatch):
    times = Times(GOOD, {("plain-fwd", "sdpa-cudnn"): "RuntimeError: no engine"})
    data = measured(monkeypatch, lambda *args: times, "plain-fwd")
    assert [str(one) for one in host.STUDY.failures(data)] == ["plain-fwd, sdpa-cudnn: RuntimeError: no engine"]
    assert not host.STUDY.has_failed(data)


@pytest.fixture
def command(monkeypatch) -> Callable[..., int]:
    """`python -m profiling host` with given values in place of measurements."""

    def run(*args: str, ours: float = 14.0) -> int:
        sides = {OURS: ours, FLOOR: 9.0, "sdpa-flash": 24.0, "sdpa-cudnn": 18.0}
        one = lambda chosen, index: Times({(case, side): us for case in chosen.cases for side, us in sides.items()})  # noqa: E731
        monkeypatch.setattr(host, "in_fresh_process", one)
        monkeypatch.setattr(arch, "has_gpu", lambda: True)
        monkeypatch.setattr(host.start, "start_times", lambda *args: {"error": "no driver"})
        monkeypatch.setattr(study, "precompile_keys", lambda keys, jobs: None)
        monkeypatch.setattr(
            study, "Tools", lambda: tools(FakeTimer(), facts=lambda: {"gpu": "fake", "git_commit": "abc"})
        )
        return cli.main(("host", *args))

    return run


def test_the_command_prints_the_table_and_writes_the_file(command, tmp_path, capsys):
    out = tmp_path / "host.json"
    assert command("--cases", "plain-fwd,softcap-fwd", "--processes", "3", "--out", str(out)) == OK
    printed = capsys.readouterr()
    assert "| plain-fwd   | 14.0 (14.0 to 14.0) |" in printed.out and "18.0 (cudnn)" in printed.out
    assert "[3/3] process 3" in printed.err
    data = json.loads(out.read_text())
    assert data["machine"]["git_commit"] == "abc" and data["settings"]["processes"] == 3
    assert data["cases"]["plain-fwd"]["over_floor_us"] == 5.0


def test_the_command_fails_for_a_goal_that_is_missed_and_compares_with_a_base(command, tmp_path, capsys):
    assert command("--cases", "plain-fwd", ours=15.5) == FAILED
    assert "plain-fwd, cute_flash: goal: floor + 6, 1 x SDPA" in capsys.readouterr().out
    assert command("--cases", "plain-fwd", "--start") == FAILED
    assert "start, cute_flash: no driver" in capsys.readouterr().out
    base, case = tmp_path / "base.json", "plain-train-profiler"
    assert command("--cases", case, "--out", str(base)) == OK
    assert command("--cases", case, "--base", str(base), ours=14.5) == OK
    assert command("--cases", case, "--base", str(base), ours=15.0) == FAILED


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a GPU")
def test_without_a_gpu_or_with_a_wrong_case_nothing_is_measured(capsys):
    assert cli.main(("host",)) == NOT_MEASURED
    assert "no CUDA device" in capsys.readouterr().err
    assert cli.main(("host", "--cases", "plain")) == NOT_MEASURED
    assert "choose from plain-fwd, plain-train" in capsys.readouterr().err


@pytest.mark.processes
def test_a_fresh_process_measures() -> None:
    times = host.in_fresh_process(settings("plain-fwd"), 0)
    assert times.us["plain-fwd", OURS] > 0 and set(times.errors) == {("plain-fwd", "sdpa-cudnn")}
