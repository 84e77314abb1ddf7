"""The operator `cute_flash::decode`: registration, torch.compile, autocast, and calls that bypass the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_flash import attn_decode, ops_decode
from cute_flash.decode import bind
from cute_flash.reference import decode as reference
from cute_flash.spec.decode import SCHEMA, TENSOR_FIELDS, DecodeArgs, tensors_of
from tests.decode.cases import DecodeCase, small_case, table_call
from tests.fakes.cuda import claiming_cuda
from tests.opchecks import assert_opcheck, each_part

PAGED = small_case(page_size=8, spare_pages=1, new=(1, 1), rotary_dim=16)
CASES = {
    "plain": small_case(),
    "paged": PAGED,
    "ragged": small_case(tokens=(2, 1), new=(2, 1), is_ragged=True, padding=2, has_sinks=True, alibi="batch"),
    "fp8": small_case(page_size=8, new=(1, 1), fp8="heads", softcap=3.0, window=(9, 2), leftpad=(1, 0)),
    "out": small_case(page_size=8, new=(1, 1), has_out=True, kv_layout="hnd", storage="joined"),
    "joined": small_case(new=(1, 1), storage="joined", has_batch_idx=True),
    "latent": small_case(is_latent=True, head_dim=24, page_size=8, new=(1, 1)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def results(function: Any, case: DecodeCase) -> list[torch.Tensor]:
    """The output, the LSE and the caches after a call."""
    call = case.build()
    out, lse = function(*call.tensors, **call.options)
    assert "out" not in call.options or out is call.options["out"]
    return [out, lse, *(x for x in (call.k_cache, call.v_cache) if x is not None)]


def eager(*tensors: Any, **options: Any) -> Any:
    return attn_decode(*tensors, return_lse=True, **options)


def test_the_schema_has_the_fields_of_the_arguments() -> None:
    schema = torch.ops.cute_flash.decode.default._schema
    assert [x.name for x in schema.arguments] == ["q", "k_cache", "v_cache", *DecodeArgs._fields]
    defaults = {x.name: x.default_value for x in schema.arguments[5:]}
    assert defaults == DecodeArgs._field_defaults
    written = [x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    assert written == ["k_cache", "v_cache", "out"] and "(c!)? out" in SCHEMA


def test_all_tensors_of_the_arguments_are_listed() -> None:
    args = DecodeArgs(*DecodeArgs._fields)  # type: ignore[arg-type]
    assert tensors_of(args) == TENSOR_FIELDS
    schema = torch.ops.cute_flash.decode.default._schema
    assert TENSOR_FIELDS == tuple(x.name for x in schema.arguments[3:] if "Tensor" in str(x.type))


@each_part
@pytest.mark.parametrize("name", [name for name in CASES if name != "fp8"])  # opcheck cannot compare FP8
def test_opcheck(name: str, part: tuple[str, ...]) -> None:
    call = CASES[name].build()
    *tensors, args = bind(*call.tensors, **call.options)
    assert_opcheck(part, ops_decode.decode_op, *tensors, *args)


@each_part
def test_opcheck_of_tables(part: tuple[str, ...]) -> None:
    call = table_call(0, torch.float32)
    *tensors, args = bind(*call.tensors, **call.options)
    assert_opcheck(part, ops_decode.decode_op, *tensors, *args)


@pytest.mark.compiles
def test_compiled_tables() -> None:
    torch._dynamo.reset()
    call = table_call(0, torch.float32)
    expected = eager(*call.tensors, **call.options)
    found = torch.compile(eager, fullgraph=True, backend="aot_eager")(*call.tensors, **call.options)
    torch.testing.assert_close(found, expected)


@each_case
def test_fake_tensors(case: DecodeCase) -> None:
    expected = results(eager, case)[:2]
    call = case.build()
    with FakeTensorMode() as mode:
        tensors = [x if x is None else mode.from_tensor(x) for x in call.tensors]
        options = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in call.options.items()}
        found = attn_decode(*tensors, return_lse=True, **options)
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def test_meta_tensors() -> None:
    q, cache = torch.empty(2, 1, 4, 16, device="meta"), torch.empty(2, 9, 2, 16, device="meta")
    assert attn_decode(q, cache, cache, cache_seqlens=3).shape == (2, 1, 4, 16)


@pytest.mark.compiles
@pytest.mark.parametrize(("name", "backend"), [*((name, "aot_eager") for name in CASES), ("ragged", "inductor")])
def test_compiled_as_one_graph(name: str, backend: str) -> None:
    torch._dynamo.reset()
    case = CASES[name]
    expected = results(eager, case)
    found = results(torch.compile(eager, fullgraph=True, backend=backend), case)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), equal_nan=True)


@pytest.mark.compiles
def test_a_compiled_loop_of_steps() -> None:
    """Several layers append to their caches and advance the lengths inside one graph, compiled once."""
    torch._dynamo.reset()

    def step(q: Any, caches: Any, options: dict[str, Any]) -> Any:
        out = q
        for k_cache, v_cache in caches:
            out = out + attn_decode(out, k_cache, v_cache, **options)
        options["cache_seqlens"].add_(1)
        return out

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    outs = []
    for function in (step, torch.compile(step, fullgraph=True, backend=counter)):
        calls = [PAGED.build(), PAGED.build()]
        caches = [(call.k_cache, call.v_cache) for call in calls]
        options = {**calls[0].options, "cache_seqlens": torch.tensor([3, 2], dtype=torch.int32)}
        with torch.no_grad():
            outs.append([function(calls[0].q, caches, options) for _ in range(4)])
    torch.testing.assert_close(outs[1], outs[0])
    assert counter.frame_count == 1


def test_autocast_changes_nothing() -> None:
    case = CASES["plain"]
    expected = results(eager, case)[:2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(eager, case)[:2]
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        call = case.build()
        with pytest.raises(ValueError, match=r"k_cache is torch\.float32 and q is torch\.bfloat16.*autocast"):
            attn_decode(call.q.bfloat16(), *call.tensors[1:], **call.options)


def test_inference_mode() -> None:
    expected = results(eager, PAGED)
    with torch.inference_mode():
        found = results(eager, PAGED)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


# ---- calls that bypass the dispatcher


@pytest.fixture
def launches() -> Iterator[list[DecodeArgs]]:
    """The calls that reach `runtime.decode.run`, which the reference computes."""
    calls: list[DecodeArgs] = []

    def run(q: Any, k_cache: Any, v_cache: Any, args: DecodeArgs, return_lse: bool = True) -> Any:
        calls.append(args)
        return reference.forward(q, k_cache, v_cache, args)

    with mock.patch.object(ops_decode, "_cuda", mock.Mock(run=run)), claiming_cuda():
        yield calls


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("case", [x for x in CASES.values() if not x.is_latent], ids=lambda case: case.id)
def test_cuda_calls_bypass_the_dispatcher(launches: list[DecodeArgs], case: DecodeCase) -> None:
    found = results(eager, case)
    assert len(launches) == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        expected = results(eager, case)
    assert len(launches) == 1, "a profiler sees the operator"
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), equal_nan=True)


def test_subclasses_go_through_the_dispatcher(launches: list[DecodeArgs]) -> None:
    call = CASES["plain"].build()
    attn_decode(call.q.as_subclass(Subclass), *call.tensors[1:], **call.options)
    call.options["cache_seqlens"] = call.options["cache_seqlens"].as_subclass(Subclass)
    attn_decode(*call.tensors, **call.options)
    assert launches == []


def test_the_cuda_kernel_of_the_operator(launches: list[DecodeArgs]) -> None:
    for case in (CASES["plain"], CASES["out"], CASES["latent"]):
        call = case.build()
        *tensors, args = bind(*call.tensors, **call.options)
        out, lse = ops_decode._decode_cuda(*tensors, *args)
        assert (out.numel() == 0) == case.has_out and lse.shape == (2, 4, 1)
    assert len(launches) == 3
