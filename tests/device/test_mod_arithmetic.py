"""Graphs of mods as kernels evaluate them: on the host, scalar by scalar, and compiled for a GPU."""

from __future__ import annotations

from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_flash.device.scores.mod_arithmetic import EXACT_OPS, OPS, CuteArithmetic
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.score_mod.derive import gradient
from cute_flash.score_mod.evaluate import Evaluator, Stages, evaluate
from cute_flash.score_mod.graph import Builder, CaptureSpec, Graph, is_per_score
from cute_flash.score_mod.graphs import Graphs
from cute_flash.score_mod.lower import lowered
from cute_flash.score_mod.mod_spec import ModSpec
from cute_flash.score_mod.proxy import ScalarProxy, TensorProxy
from cute_flash.score_mod.trace import BoundMod, bind
from tests.operations import SCORE_MODS, places, scores

SIZE, HEAD, BATCH, GRAD = 7, 2, 1, 1.7
TABLE = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
FLAGS = torch.tensor([True, False, True, True, False, True])
IDS = torch.tensor([0, 3, 3, 1, 1, 0, 2])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
COUNT, RATE = 3, 2.5


@pytest.fixture
def host_instructions(monkeypatch: pytest.MonkeyPatch, on_one_thread: None) -> None:
    for operations in (OPS, EXACT_OPS):
        monkeypatch.setitem(operations, "erf", host_erf)


def host_erf(x: Float32) -> Float32:
    """Within 2e-7 (Abramowitz and Stegun, 7.1.26); the CPU has no erf."""
    size, total = cute.math.absf(x), Float32(0.0)
    t = Float32(1.0) / (1.0 + 0.3275911 * size)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        total = (total + factor) * t
    result = 1.0 - total * cute.math.exp(-size * size)
    return Float32(cutlass.select_(x < 0.0, -result, result))


def everything(score, b, h, q, kv):
    d = q - kv
    x = score * RATE + TABLE[h, d.abs()] - d // COUNT + d % COUNT + (-d) // 4 + d % -5
    x = x + torch.where(FLAGS[kv] & ~(q < kv) | (IDS[q] == IDS[kv]), torch.tanh(score), 0.3)
    x = x + torch.exp(-score.abs()) + torch.log(score.abs() + 1) + torch.sqrt(score * score + 0.1)
    x = x + torch.rsqrt(score * score + 1) + torch.sigmoid(score) + score % 0.7 + score % -0.7
    x = x + torch.minimum(score, kv) + torch.maximum(score, q * 0.1) + (kv << 2) + (q >> 1) + (kv & 3)
    x = x + (q ^ 5) + (~q) + (kv | 1) + torch.exp2(score * 0.1) + torch.log2(score * score + 2)
    x = x + score.floor() + score.sin() + score.cos() + score.int() + score / RATE + q / 7 + score / 3
    x = x + torch.minimum(q, kv) + d.clamp(-2, 2) + (q > kv).float() + (q != 0).logical_xor(kv != 0).int()
    return x - SLOPES[h] * d.abs() + h * b


def without_the_score(score, b, h, q, kv):
    return SLOPES[h] * RATE + q


def on_the_host(found: BoundMod, graph: Graph, score: torch.Tensor, is_exact: bool = False) -> torch.Tensor:
    num = len(graph.outputs)

    @cute.jit
    def program(out, score, captures, scalars):  # type: ignore[no-untyped-def]
        evaluator = Evaluator(graph, CuteArithmetic(is_exact), tuple(captures), tuple(scalars))
        head = evaluator.at_head(Int32(BATCH), Int32(HEAD))
        for i in cutlass.range_constexpr(SIZE):
            row = evaluator.at_row(head, Int32(i))
            for j in cutlass.range_constexpr(SIZE):
                column = evaluator.at_column(head, Int32(j), Float32(j))
                values = evaluator.at(head, row, column, score[i, j], Float32(GRAD))
                for n in cutlass.range_constexpr(num):
                    out[n, i, j] = Float32(values[n])

    out = torch.full((num, SIZE, SIZE), torch.nan)
    captures = [from_dlpack(x.to(torch.uint8) if x.dtype == torch.bool else x) for x in found.captures]
    scalars = [Float32(x) if isinstance(x, float) else Int32(x) for x in found.scalars]
    # The DSL takes no empty lists.
    program(from_dlpack(out), from_dlpack(score), captures or [from_dlpack(score)], scalars or [Int32(0)])
    return out


@pytest.mark.compiles
@pytest.mark.usefixtures("host_instructions")
@pytest.mark.parametrize("way", ["as traced", "lowered", "gradient"])
@pytest.mark.parametrize("function", [everything, without_the_score])
def test_values(function: Any, way: str) -> None:
    found = bind(function, "score_mod")
    graph = found.graph
    if way != "as traced":
        wanted = tuple(i for i, x in enumerate(graph.captures) if x.is_differentiable)
        graph = lowered(gradient(graph, wanted).graph if way == "gradient" else graph)
    score = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 3
    places = torch.tensor(BATCH), torch.tensor(HEAD), torch.arange(SIZE)[:, None], torch.arange(SIZE)
    grad = torch.tensor(GRAD, dtype=torch.float64)
    arguments = found.captures, found.scalars
    expected = evaluate(graph, arguments, torch.float64, places, score.double(), grad)
    values = on_the_host(found, graph, score)
    for one, other in zip(values, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double().expand(SIZE, SIZE), rtol=3e-6, atol=3e-5)


@pytest.mark.compiles
@pytest.mark.usefixtures("host_instructions")
@pytest.mark.parametrize("name", ["tanh", "exp", "log", "sin", "cos", "sigmoid", "sqrt", "rsqrt", "exp2", "log2"])
def test_functions_of_fp32_calls(name: str) -> None:
    """They have errors of a few units in the last place, also near the zeros of tanh, log and sin."""
    builder = Builder()
    graph = builder.graph(builder.op(name, builder.input("score")))
    score = torch.linspace(0.0, 1.0, SIZE * SIZE).view(SIZE, SIZE).square() * 30 + 1e-3
    score[0, :4] = torch.tensor([1e-6, 1.001, 0.999, 3.1415])
    (values,) = on_the_host(BoundMod(graph, (), ()), graph, score, is_exact=True)
    torch.testing.assert_close(values.double(), getattr(torch, name)(score.double()), rtol=6e-7, atol=0.0)


@pytest.mark.kernels("fwd_sm80", "fwd_sm90")
@pytest.mark.compiles
@pytest.mark.usefixtures("host_instructions")
@pytest.mark.parametrize("way", ["lowered", "gradient"])
@pytest.mark.parametrize("name", SCORE_MODS)
def test_each_operation(name: str, way: str) -> None:
    """fp32 in a kernel against fp32 in torch. fp64 would differ, because it has other multiples of 0.1."""
    found = bind(SCORE_MODS[name], "score_mod")
    graph = lowered(gradient(found.graph).graph if way == "gradient" else found.graph)
    score, grad = scores(SIZE).float(), torch.tensor(GRAD)
    arguments = found.captures, found.scalars
    expected = evaluate(graph, arguments, torch.float32, places(SIZE, BATCH, HEAD), score, grad)
    (value,) = on_the_host(found, graph, score)
    torch.testing.assert_close(value, expected[0].expand(SIZE, SIZE), rtol=1e-5, atol=3e-5)


def test_lowered_graphs_convert_rows_and_columns_only() -> None:
    found = bind(lambda s, b, h, q, kv: s / RATE - SLOPES[h] * (q - kv).abs(), "score_mod")
    graph = lowered(found.graph)
    inner = [graph.nodes[i].op for i in Stages.of(graph).nodes[3]]
    assert sorted(inner) == ["abs", "input", "mul", "mul", "sub", "sub"]
    # Not if the conversion is inexact, or not known to be exact.
    other = bind(lambda s, b, h, q, kv: s + (q - kv) * 3 + (q - kv + COUNT), "score_mod")
    inner = [lowered(other.graph).nodes[i].op for i in Stages.of(lowered(other.graph)).nodes[3]]
    assert inner.count("to_float") == 2


INTS = torch.tensor([-(1 << 31), -(1 << 30) - 1, -9, -1, 0, 5, (1 << 31) - 1], dtype=torch.int32)
POWERS = [1 << i for i in range(31)]


def divided(powers: list[int]) -> BoundMod:
    """INTS[kv] // n and INTS[kv] % n for each power n, in halves of 16 bits, which are exact as floats."""
    builder = Builder([CaptureSpec("int32", 1)])
    x, outputs = builder.load(0, [builder.input("kv")]), []
    for power in powers:
        for name in ("floordiv", "mod"):
            y = builder.op(name, x, builder.constant(power))
            outputs += [builder.op("shr", y, builder.constant(16)), builder.op("and", y, builder.constant(0xFFFF))]
    return BoundMod(builder.graph(*outputs), (INTS,), ())


def test_division_by_powers_of_two_rounds_down() -> None:
    """Lowered, it is a shift or an AND; the result is that of torch's division."""
    found = divided(POWERS)
    graph = lowered(found.graph)
    assert not {"floordiv", "mod"} & {node.op for node in graph.nodes}
    values = evaluate(graph, (found.captures, ()), torch.float32, places(SIZE))
    exact = [f(INTS.long(), power) for power in POWERS for f in (torch.floor_divide, torch.remainder)]
    for i, y in enumerate(exact):
        assert torch.equal((values[2 * i] * 65536 + values[2 * i + 1]).expand_as(y), y)


@pytest.mark.compiles
def test_division_by_powers_of_two_on_the_host() -> None:
    found = divided([1, 2, 64, 1 << 30])
    values = on_the_host(found, lowered(found.graph), torch.zeros(SIZE, SIZE))
    expected = evaluate(found.graph, (found.captures, ()), torch.float32, places(SIZE))
    for one, other in zip(values, expected, strict=True):
        assert torch.equal(one, other.float().expand(SIZE, SIZE))


# ---- 64 bits

WIDE = torch.tensor([5, 5 + (1 << 32), -1, 1 << 62, -(1 << 63), -3_000_000_000, 7])
PARTS = (0, 16, 32, 48)  # shifts of the 16-bit parts of an int64, which are exact as floats
WIDE_MODS: dict[str, Any] = {
    **{op.__name__: lambda a, b, q, op=op: op(a, b) for op in (eq, ne, lt, le, gt, ge)},
    "arithmetic": lambda a, b, q: (a + b) ^ (a - b) * 3 ^ (a * b) ^ (a & b) ^ (a | b),
    "unary": lambda a, b, q: ~a + abs(b) ^ -a,
    "min max": lambda a, b, q: torch.minimum(a, b) ^ torch.maximum(a, q),
    "shifts": lambda a, b, q: (a << 9 * q) ^ (b >> 9 * q),
    "division": lambda a, b, q: ((a >> 1) // (b | 1)) ^ ((a >> 1) % (b | 1)) ^ (a // (q + 1)) ^ (b % -(q + 3)),
    "division by powers of two": lambda a, b, q: (a // (1 << 33)) ^ (b % (1 << 40)) ^ (a % 8),
    "where": lambda a, b, q: torch.where(a < b, a, q),
    "numbers": lambda a, b, q: (a ^ 0x5DEECE66D1) + q.long() * (1 << 40) + COUNT,
    "comparisons with positions": lambda a, b, q: (a < q) ^ (q == b) ^ (q * 2 - 9 >= a) ^ (a != 5) ^ (b > -(1 << 40)),
    "casts": lambda a, b, q: a.int() + (b.float() * 1e-12).int() + q.long() * (1 << 35) + a.bool().long(),
    "casts of floats": lambda a, b, q: (a.float() * 0.75).long() + (b.float() * 0.5).long() // 1000,
    "positions": lambda a, b, q: (q.long() - 3).abs() * 2 - torch.clamp(q.long(), max=4),
}


@pytest.mark.compiles
@pytest.mark.usefixtures("host_instructions")
@pytest.mark.parametrize("name", WIDE_MODS)
def test_ints_of_64_bits(name: str) -> None:
    """As torch computes them, also after lowering, for values that differ only above bit 32."""
    function = WIDE_MODS[name]

    def parts(a: Any, b: Any, q: Any) -> list[Any]:
        x = function(a, b, q)
        return [x.float()] if x.dtype == torch.bool else [((x >> shift) & 0xFFFF).float() for shift in PARTS]

    builder = Builder([CaptureSpec("int64", 1)])
    q, kv = (ScalarProxy(builder, builder.input(name)) for name in ("q", "kv"))
    table = TensorProxy(builder, 0, lambda: ())
    graph = builder.graph(*(x._node for x in parts(table[q], table[kv], q)))
    expected = parts(WIDE[:, None], WIDE, torch.arange(SIZE, dtype=torch.int32)[:, None])
    for one in (graph, lowered(graph)):
        by_torch = evaluate(one, ((WIDE,), ()), torch.float32, places(SIZE))
        by_kernel = on_the_host(BoundMod(one, (WIDE,), ()), one, torch.zeros(SIZE, SIZE))
        for x, y, z in zip(expected, by_torch, by_kernel, strict=True):
            assert torch.equal(y.expand(SIZE, SIZE), x.expand(SIZE, SIZE))
            assert torch.equal(z, x.expand(SIZE, SIZE))


def test_64_bits_only_where_they_are_needed() -> None:
    """Positions stay in 32 bits; an int64 that is compared with them, or is an index, is clamped once per row."""
    lengths, ids, small = torch.tensor([3, 4]), torch.arange(SIZE) << 40, torch.arange(SIZE, dtype=torch.int32)

    def kinds(mask: Any) -> list[str]:
        graph = lowered(bind(mask, "mask_mod").graph)
        return sorted({node.op for i, node in enumerate(graph.nodes) if is_per_score(graph.depends[i]) and (
            "int64" in (node.kind, *(graph.nodes[j].kind for j in node.args)))})  # fmt: skip

    assert kinds(lambda b, h, q, kv: (q - kv).abs() < lengths[b]) == []
    assert kinds(lambda b, h, q, kv: (q.long() - kv.long()).abs().clamp(max=9) >= lengths[b]) == []
    assert kinds(lambda b, h, q, kv: small[lengths[b] + ids[q]] == small[kv]) == []
    assert kinds(lambda b, h, q, kv: (q - kv < 1 << 40) & (q > ids[kv])) == []
    assert kinds(lambda b, h, q, kv: ids[q] == ids[kv]) == ["eq"]
    assert kinds(lambda b, h, q, kv: small[q] == ids[kv]) == ["eq"]  # a clamped id could equal the largest int32
    assert kinds(lambda b, h, q, kv: q * 1000 - kv < ids[q]) == ["lt", "to_int64"]
    without = bind(lambda s, b, h, q, kv: s + small[q - kv] * (kv % 3), "score_mod").graph
    assert "int64" not in lowered(without).text and "int64" not in lowered(gradient(without).graph).text


def test_lowered_division_by_powers_of_two() -> None:
    """By other ints, and by captured ints, it stays a division. `ModSpec` counts the lowered operations."""
    one = bind(lambda b, h, q, kv: ((q - kv) // 8 > 2) & ((q - kv) % 8 == 3) & (kv % 1 == 0), "mask_mod").graph
    other = bind(lambda b, h, q, kv: ((q - kv) >> 3 > 2) & ((q - kv) & 7 == 3), "mask_mod").graph
    assert lowered(one) == lowered(other)
    assert ModSpec(Graphs(mask=one)).bwd_ops_per_score == ModSpec(Graphs(mask=other)).bwd_ops_per_score == 6
    kept = bind(lambda b, h, q, kv: (kv // 3 == q % -4) | (kv % COUNT == q // COUNT), "mask_mod").graph
    ops = [node.op for node in lowered(kept).nodes]
    assert ops.count("floordiv") == ops.count("mod") == 2


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_division_by_powers_of_two_for_a_gpu(arch: str, tmp_path: Path) -> None:
    """There is no division and no correction of its result, which would select one of two quotients."""
    found = bind(lambda s, b, h, q, kv: s + ((q - kv) // 8) * ((q + kv) % 8), "score_mod")
    ptx = compiled(found.graph, arch, tmp_path).__ptx__
    assert not any(name in ptx for name in ("div.", "rem.", "mul.hi", "selp")), ptx


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiled_for_a_gpu(arch: str, tmp_path: Path) -> None:
    """Values of a head and a row are computed before the loop; a table of a head is loaded once."""
    found = bind(lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv).abs() + TABLE[h, kv] * RATE, "score_mod")
    made = compiled(found.graph, arch, tmp_path)
    assert made.__cubin__
    loads = made.__ptx__.count("ld.global")
    # Loads: one slope; a score and a table element for each column.
    assert loads == 1 + 2 * COLUMNS, made.__ptx__


@pytest.mark.kernels("fwd_sm80", "fwd_sm90")
@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_all_operations_compiled_for_a_gpu(arch: str, tmp_path: Path) -> None:
    def mod(score, b, h, q, kv):
        return sum(one(score, b, h, q, kv) for one in SCORE_MODS.values())

    graph = bind(mod, "score_mod").graph
    for one in (graph, gradient(graph).graph):
        assert compiled(one, arch, tmp_path).__cubin__


@pytest.mark.compiles
def test_only_indices_that_may_be_negative_pay_for_wrapping(tmp_path: Path) -> None:
    """Wrapping shifts the sign bits of an index into a mask, once per column."""
    shifts = []
    for index in (lambda q, kv: (q - kv).abs(), lambda q, kv: q - kv):
        found = bind(lambda s, b, h, q, kv: s + SLOPES[index(q, kv)], "score_mod")  # noqa: B023
        shifts.append(compiled(found.graph, "sm_80", tmp_path).__ptx__.count("shr.s32"))
    assert shifts[1] - shifts[0] == COLUMNS


COLUMNS = 8


def compiled(graph: Graph, arch: str, folder: Path) -> Any:
    """A kernel that evaluates the lowered graph for a row of scores."""
    graph, keys = lowered(graph), COLUMNS

    @cute.kernel
    def kernel(score, captures, scalars):  # type: ignore[no-untyped-def]
        evaluator = Evaluator(graph, CuteArithmetic(), tuple(captures), tuple(scalars))
        head = evaluator.at_head(cute.arch.block_idx()[0], cute.arch.block_idx()[1])
        row = evaluator.at_row(head, cute.arch.thread_idx()[0])
        for n in cutlass.range(score.shape[0] // keys, unroll=1):
            for c in cutlass.range_constexpr(keys):
                column = evaluator.at_column(head, n * keys + c)
                x = score[n * keys + c]
                score[n * keys + c] = evaluator.at(head, row, column, x, x)[0]

    @cute.jit
    def program(score, captures, scalars, stream):  # type: ignore[no-untyped-def]
        kernel(score, captures, scalars).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    captures = [
        make_fake_tensor(
            CUTE_DTYPES[table.dtype],
            tuple(cute.sym_int() for _ in range(table.rank)),
            tuple(cute.sym_int64() for _ in range(table.rank)),
        )
        for table in graph.captures
    ]
    scalars = [Float32(1.0) if kind == "float" else Int32(1) for kind in graph.scalars]
    score = make_fake_compact_tensor(Float32, (cute.sym_int(),))
    scalars = scalars or [Int32(0)]  # the DSL takes no empty lists
    return cute.compile(
        program, score, captures, scalars, make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir={folder}",
    )  # fmt: skip
