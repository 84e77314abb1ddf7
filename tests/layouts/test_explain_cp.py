"""The cost model of context parallelism, and `cute-flash explain --cp`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cute_flash.errors import UnsupportedError
from cute_flash.spec.arch import GPUS
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem
from cute_flash.tools import cli
from layouts.studies.cp_cost import LINKS, RATES, Cost, Model
from profiling.documents.sources import BACKWARD, FORWARD, read

CAUSAL = Band(None, 0)
PROBLEM = Problem(1, 32, 8, 1 << 17, 1 << 17, 128, band=CAUSAL)


def costs(ranks: int = 8, link: str = "nvlink", problem: Problem = PROBLEM) -> dict[str, Cost]:
    return {cost.method: cost for cost in Model(problem, ranks, LINKS[link]).costs()}


def test_rates_are_those_of_the_measured_runs() -> None:
    for i, source in enumerate((FORWARD, BACKWARD)):
        run = read(source)
        for head_dim, rates in RATES.items():
            (cell,) = [
                cell for cell in run.cells
                if (cell.shape.head_dim, cell.shape.seqlen, cell.shape.causal) == (head_dim, 16384, False)
            ]  # fmt: skip
            tflops = cell.results["cute_flash"].tflops
            assert tflops is not None and round(tflops) == rates[i]


def test_links_of_the_command() -> None:
    assert tuple(LINKS) == cli.LINKS


def test_computation_is_divided_by_the_ranks() -> None:
    for ranks in (2, 8, 64):
        for cost in costs(ranks).values():
            compute = cost.forward.compute + cost.backward.compute
            assert compute * ranks == pytest.approx(cost.single_ms, rel=0.01)
            assert cost.ms > compute and 0 < cost.efficiency < 1


def test_a_ring_hides_messages_behind_computation() -> None:
    fast, slow = costs(8)["ring"], costs(8, "infiniband")["ring"]
    assert fast.forward.exposed == 0 < slow.forward.communication
    short = costs(8, "infiniband", replace(PROBLEM, seqlen_q=4096, seqlen_k=4096))["ring"]
    assert short.forward.exposed > 0.5 * short.forward.communication
    assert costs(8)["allgather"].forward.exposed == costs(8)["allgather"].forward.communication


def test_no_computation_hides_the_gradients_of_the_last_group() -> None:
    for ranks, steps in ((2, 1), (4, 1), (8, 2), (16, 2)):
        model = Model(PROBLEM, ranks, LINKS["nvlink"])
        shapes = model.shapes
        # Rank 0 is the earliest, so it sees all keys of the other shards.
        schedule = model._schedule(ranks, shapes)
        forward, backward = model._ring_passes(schedule, 0, model.link, shapes)
        one = model.link.ms(shapes.kv_elements * shapes.element_bytes, 2)
        assert forward.exposed == 0 and backward.exposed == pytest.approx(steps * one)
        assert forward.communication == pytest.approx((ranks - 1) * one)
        assert backward.communication == pytest.approx(2 * forward.communication)


def test_a_group_is_hidden_by_the_group_before_it() -> None:
    # The link is so slow that it is busy during all calls except those of the last group.
    model = Model(PROBLEM, 8, replace(LINKS["nvlink"], gbps=1.0))
    shapes, schedule = model.shapes, model._schedule(8, model.shapes)
    forward, _ = model._ring_passes(schedule, 0, model.link, shapes)
    own, (other,) = schedule.calls(0, 0), schedule.group(0, schedule.groups[1]).calls
    times = [model._call(*own, shapes, True), model._call(other, shapes, True)]
    hidden = sum(compute[0] + passes[0] for compute, passes in times)
    assert forward.communication - forward.exposed == pytest.approx(hidden)


def test_ratios_are_over_all_ranks() -> None:
    model = Model(replace(PROBLEM, seqlen_q=1 << 16, seqlen_k=1 << 16), 8, LINKS["nvlink"])
    forward, backward = model.kernel_ratios()
    slowest = model.ring()
    whole = [x / 8 for x in model.compute_ms(model.pairs)]
    assert 1.02 < forward < (slowest.forward.compute + slowest.forward.passes) / whole[0]
    assert 1.02 < backward < 1.1
    # Without GQA, groups have two steps.
    two_steps = Model(replace(model.problem, heads_kv=32), 8, LINKS["nvlink"]).kernel_ratios()
    assert forward + 0.02 < two_steps[0] < 1.1


def test_windows_need_fewer_hops() -> None:
    narrow = Model(replace(PROBLEM, band=Band(4096, 0)), 8, LINKS["nvlink"], kind="contiguous").ring()
    assert narrow.hops == 1 and costs(8)["ring"].hops == 2


def test_methods_that_do_not_fit_are_left_out() -> None:
    assert set(costs(8)) == {"ring", "allgather", "ulysses"}
    assert set(costs(64)) == {"ring", "allgather", "usp"}
    assert set(costs(8, problem=replace(PROBLEM, heads=9, heads_kv=3))) == {"ring", "allgather"}
    with pytest.raises(UnsupportedError, match="shards one sequence"):
        Model(replace(PROBLEM, seqlen_k=8), 8, LINKS["nvlink"])


def test_other_gpus_are_scaled() -> None:
    a100 = Model(PROBLEM, 8, LINKS["nvlink"], GPUS["A100"]).ring()
    assert a100.forward.compute == pytest.approx(costs(8)["ring"].forward.compute * 989 / 312)


@pytest.mark.slow
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "1,32,131072,128", "--kv-heads", "8", "--causal", "--gpu", "H200", "--cp", "8"]) == 0
    text = capsys.readouterr().out
    assert "8 x H200, zigzag shards of 16,384 tokens" in text and "A model: rates measured on one H200" in text
    assert "ulysses: the fewest bytes" in text
    arguments = "explain 1,32,131072,128 --causal --gpu A100 --cp 512 --link infiniband --json".split()
    assert cli.main(arguments) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["auto"] in found["sent_bytes"] and found["link"] == "infiniband"
    assert {method["method"] for method in found["methods"]} == {"ring", "allgather", "usp"}
    for wrong in (["--link", "nvlink"], ["--cp", "8", "--seqlen-k", "9"], ["--cp", "8", "--cache-len", "9"]):
        assert cli.main(["explain", "1,32,128,128", *wrong]) == 2
