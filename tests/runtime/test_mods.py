"""Calls with user mods, a bias and block masks up to their launches, on CPU tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import BlockMask, UnsupportedError, masks
from cute_flash.planning import plan as planning
from cute_flash.reference import cpu
from cute_flash.runtime import launcher
from cute_flash.runtime.gpu import bound
from cute_flash.score_mod.graphs import Graphs
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.features import BIAS
from cute_flash.spec.problem import Problem
from tests.arguments import call_args
from tests.combinations import RNG
from tests.fakes.gpu import FakeGpu
from tests.lengths import Lengths
from tests.mod_cases import Case as ModCase
from tests.mod_cases import Kind, Sizes
from tests.runtime.calls import inputs, normal, plain, run_backward, run_forward

B, H, HKV, SQ, SK, D = 2, 4, 2, 150, 333, 16
FACTORS = normal(H, seed=11, dtype=torch.float32)
TABLE = normal(H, 40, seed=12, dtype=torch.float64)
OF_KEYS = normal(SK, seed=13, dtype=torch.bfloat16)
ONE = torch.tensor(0.7)
IDS = torch.arange(SK) // 60
FLAGS = torch.arange(SK) % 3 > 0
CAP, STEP = 3.0, 2


def capped(score, b, h, q, kv):
    return CAP * torch.tanh(score * FACTORS[h] / CAP) + ONE


def with_tables(score, b, h, q, kv):
    return score + TABLE[h, (q - kv).abs() // STEP] - OF_KEYS[kv] * ONE


def doubled(grad, score, b, h, q, kv):
    return grad * 2.0 * FACTORS[h]


def documents(b, h, q, kv):
    return (IDS[q + 100] == IDS[kv]) & FLAGS[kv]


def by_head(b, h, q, kv):
    return (kv + h * 40 < q + 128) | (b == 1)


@dataclass(frozen=True)
class Case:
    score_mod: Callable | None = None
    mask_mod: Callable | None = None
    bias: tuple[int, ...] | None = None
    bias_dtype: torch.dtype = torch.bfloat16
    score_mod_bwd: Callable | None = None
    has_block_mask: bool = False
    window: tuple[int | None, int | None] = (None, None)
    fields: dict[str, Any] = field(default_factory=dict)

    def args(self, tensors: list[Tensor], **fields: Any) -> AttentionArgs:
        """With gradients of the bias and of floating-point captures of score_mod."""
        bias = None
        if self.bias is not None:
            bias = normal(*self.bias, seed=9, dtype=torch.float32).to(self.bias_dtype).requires_grad_()
        args = call_args(
            tensors[0], bias=bias, score_mod=self.score_mod, mask_mod=self.mask_mod,
            score_mod_bwd=self.score_mod_bwd, block_mask=self.block_mask(tensors),
            **{**self.fields, **fields},
        )._replace(scale=0.3, window_left=self.window[0], window_right=self.window[1])  # fmt: skip
        num = 0 if args.mods.score is None else len(args.mods.score.captures)
        needs = [i < num and x.is_floating_point() for i, x in enumerate(args.captures)]
        return args._replace(needs_grad=(bias is not None, *needs), bias=None if bias is None else args.bias.detach())

    def block_mask(self, tensors: list[Tensor]) -> BlockMask | None:
        if not self.has_block_mask:
            return None
        sizes = tensors[0].shape[2], tensors[1].shape[2]
        if self.mask_mod is not None:
            return BlockMask.of(self.mask_mod, (B, H, *sizes))
        # Blocks of all kinds; mask_mod is not evaluated.
        generator = torch.Generator().manual_seed(5)
        blocks = tuple(-(-n // 128) for n in sizes)
        status = torch.randint(0, 3, (1, H, *blocks), generator=generator).to(torch.uint8)
        status[..., -1].clamp_(max=1)
        return BlockMask.of_status(status, 128, 128, *sizes)


FEATURES = {
    "softcap": 2.0,
    "alibi": torch.tensor([0.1, 0.2, -0.1, 0.0]),
    "dropout": 0.3,
    "rng": torch.tensor(RNG),
    "sinks": torch.tensor([0.3, 1.0, 0.0, -2.0]),
}
CASES = {
    "capped": Case(capped),
    "tables": Case(with_tables, window=(None, 0)),
    "own gradient": Case(capped, score_mod_bwd=doubled),
    "documents": Case(None, documents),
    "full bias": Case(bias=(B, H, SQ, SK)),
    "full bias, causal": Case(bias=(B, H, SQ, SK), window=(None, 0), bias_dtype=torch.float32),
    "double bias": Case(bias=(B, H, SQ, SK), bias_dtype=torch.float64),
    "bias of heads": Case(bias=(1, H, SQ, SK)),
    "bias of keys": Case(bias=(B, 1, 1, SK), bias_dtype=torch.float16),
    "bias of queries": Case(bias=(1, 1, SQ, 1), bias_dtype=torch.float32),
    "bias of few dimensions": Case(bias=(SQ, SK)),
    "all": Case(with_tables, documents, (1, H, SQ, SK), fields=FEATURES, window=(100, 20)),
    "documents, block mask": Case(None, documents, has_block_mask=True),
    "heads, block mask": Case(None, by_head, has_block_mask=True, window=(None, 30)),
    "all, block mask": Case(with_tables, by_head, (B, 1, SQ, SK), fields=FEATURES, has_block_mask=True),
    "block mask alone": Case(has_block_mask=True),
}


def tensors() -> list[Tensor]:
    return [normal(B, heads, s, D, seed=i) for i, (heads, s) in enumerate(((H, SQ), (HKV, SK), (HKV, SK)))]


# ---- forward


@pytest.mark.parametrize("name", CASES)
def test_forward(gpu: FakeGpu, name: str) -> None:
    args = CASES[name].args(tensors())
    run_forward(tensors(), args)
    static = gpu.main.key.static
    assert gpu.main.kernel == f"fwd_{gpu.family}" and static.has_mods
    assert static.block_sparse == bool(args.block_mask)
    # Gradients do not change the forward kernel.
    assert static.mods.graphs == Graphs(args.mods.score, args.mods.mask)
    assert static.mods == static.mods.for_forward


def test_arguments(gpu: FakeGpu) -> None:
    kind = Kind(64, score="gated", mask="by_head", bias=torch.bfloat16, has_block_mask=True)
    case = ModCase(kind, Sizes(2, 4, 2, 300, 200), device="cpu")
    run_forward(list(case.inputs()), case.args())
    launch = gpu.main
    assert launch["bias"].shape == (2, 4, 300, 200) and launch["scalars"] == [40]
    assert [x.dtype for x in launch["captures"]] == [
        torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.uint8,
    ]  # fmt: skip
    # A 0-d tensor is passed as a row of one element.
    assert [x.dim() for x in launch["captures"]] == [2, 1, 1, 1, 2]
    assert [tuple(x.shape) for x in launch["block_indices"]] == [(2, 4, 3), (2, 4, 3, 2)] * 2
    mods = launch.key.static.mods
    assert (mods.bias_dtype, mods.bias_paired_loads, mods.block_mask_tile) == ("bfloat16", True, (128, 128))


def test_values_of_captures_compile_nothing(gpu: FakeGpu) -> None:
    for scale in (0.3, -0.7):
        table, width = normal(H, seed=int(10 * scale) + 20, dtype=torch.float32), 3 + int(10 * abs(scale))

        def score_mod(score, b, h, q, kv, table=table):
            return score * table[h]

        args = call_args(tensors()[0], score_mod=score_mod, mask_mod=masks.sliding_window(width))
        run_forward(tensors(), args._replace(scale=scale))
    assert len(gpu.keys) == 1


def test_rows_of_a_bias_are_within_reach_of_each_other() -> None:
    sizes = (2, 4, 300, 200)
    assert BIAS.value is not None
    problem = Problem(2, 4, 2, 300, 200, 64)
    for stride, expected in ((1 << 30, 200), (1 << 29, 1 << 29)):
        bias = torch.empty_strided(sizes, (8, 1 << 45, stride, 1), dtype=torch.bfloat16, device="meta")
        assert BIAS.value(plain(bias=bias), problem).stride(2) == expected


PAIRS = {
    "fp32": (torch.zeros(2, 4, 3, 8), True),
    "16 bits": (torch.zeros(2, 4, 3, 8).bfloat16(), True),
    "one row": (torch.zeros(1, 1, 1, 8), True),
    "even rows": (torch.zeros(2, 4, 3, 10)[..., :8], True),
    "odd rows": (torch.zeros(2, 4, 3, 9)[..., :8], False),
    "begins between pairs": (torch.zeros(2, 4, 3, 10)[..., 1:9], False),
    "columns": (torch.zeros(2, 4, 8, 3).mT, False),
    "one column": (torch.zeros(2, 4, 3, 1), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_keys_of_a_bias_are_loaded_together_where_aligned(sm_90: FakeGpu, name: str) -> None:
    bias, expected = PAIRS[name]
    q, k = normal(2, 4, 3, 16), normal(2, 4, 8, 16)
    run_forward([q, k, k], plain(bias=bias))
    assert sm_90.main.key.static.mods.bias_paired_loads == expected
    # An odd number of keys ends with half a pair.
    run_forward([q, k[:, :, :7], k[:, :, :7]], plain(bias=bias[..., : min(7, bias.shape[3])]))
    assert not sm_90.main.key.static.mods.bias_paired_loads


def test_tma_loads_a_bias_of_aligned_rows(sm_90: FakeGpu) -> None:
    q, k = normal(2, 4, 30, 64), normal(2, 4, 64, 64)
    whole = torch.zeros(2, 4, 30, 72).bfloat16()
    calls: dict[str, tuple[Tensor, dict[str, Any], bool]] = {
        "aligned": (whole[..., :64], {}, True),
        "rows of 66": (torch.zeros(2, 4, 30, 66).bfloat16()[..., :64], {}, False),
        "fp32": (whole.float()[..., :64], {}, False),
        "one row": (whole[:, :, :1, :64], {}, False),
        "begins between 16 bytes": (whole[..., 2:66], {}, False),
        "tiles may not differ": (whole[..., :64], {"batch_invariant": True, "deterministic": True}, False),
    }
    for name, (bias, fields, expected) in calls.items():
        launcher.forward(q, k, k, plain(bias=bias, **fields))
        assert sm_90.main.key.static.mods.bias_tma == expected, name


# ---- backward


def run_gradients(case: Case, inputs: list[Tensor] | None = None, has_dlse: bool = False, **fields: Any) -> Any:
    inputs = tensors() if inputs is None else inputs
    dlse = normal(*inputs[0].shape[:3], seed=6, dtype=torch.float32) if has_dlse else None
    return run_backward(inputs, case.args(inputs, **fields), dlse=dlse, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(gpu: FakeGpu, case: Case) -> None:
    for has_dlse in (False, True):
        run_gradients(case, has_dlse=has_dlse)
    assert gpu.main.kernel == f"bwd_{gpu.family}" and gpu.main.key.static.has_mods
    num = len(gpu.keys)
    run_gradients(case)
    assert len(gpu.keys) == num, "known signatures compile nothing"


def test_gradients_of_wide_heads(gpu: FakeGpu) -> None:
    inputs = [normal(1, 2, 40, 192, seed=i) for i in range(3)]
    run_gradients(Case(None, by_head, (1, 1, 40, 40)), inputs)
    assert gpu.main.kernel == ("bwd_sm80" if gpu.family == "sm80" else "bwd_sm90_wide")


def test_deterministic(gpu: FakeGpu) -> None:
    for name in (
        "bias of keys", "bias of heads", "full bias", "documents", "documents, block mask", "heads, block mask",
    ):  # fmt: skip
        run_gradients(CASES[name], deterministic=True)
        assert gpu.main.kernel == f"bwd_{gpu.family}" and gpu.main["dq_progress"] is not None
        assert not gpu.main.key.static.mods.dbias_accumulates


def test_tma_moves_a_bias_and_its_gradient(sm_90: FakeGpu) -> None:
    """TMA stores 16-bit terms of the gradient if at most four scores share an element of the bias."""
    whole = torch.zeros(2, 4, 30, 64).bfloat16()
    # (bias, fields of the call) -> by TMA: the bias, its gradient; and whether the kernel adds to the gradient
    calls: dict[str, tuple[Tensor, dict[str, Any], tuple[bool, bool, bool]]] = {
        "of all": (whole, {}, (True, True, False)),
        "of heads": (torch.zeros(1, 4, 30, 64).bfloat16(), {}, (True, True, False)),
        "of sequences": (torch.zeros(2, 1, 30, 64).bfloat16(), {}, (True, True, False)),
        "shared by eight": (torch.zeros(1, 1, 30, 64).bfloat16(), {}, (False, False, True)),
        "softcap": (whole, {"softcap": 5.0}, (True, False, False)),
        "deterministic": (whole, {"deterministic": True}, (True, False, False)),
        "fp16": (whole.half(), {}, (True, False, False)),
        "fp32": (whole.float(), {}, (False, False, False)),
        "60 keys": (whole[..., :60], {}, (True, False, False)),
    }

    def check(bias: Tensor, fields: dict[str, Any], expected: tuple[bool, bool, bool], width: int = 64) -> None:
        inputs = [normal(2, 4, n, width, seed=n) for n in (bias.shape[2], bias.shape[3], bias.shape[3])]
        sm_90.launches.clear()
        run_backward(inputs, plain(bias=bias, **fields), atol=0.03)
        mods, tile = sm_90.main.key.static.mods, sm_90.main.key.tile
        assert (mods.bias_tma, mods.dbias_tma, mods.dbias_accumulates) == expected
        assert (getattr(tile, "bias_stages", 0) > 0) == mods.bias_tma

    for bias, fields, expected in calls.values():
        check(bias, fields | {"needs_grad": (True,)}, expected)
        sums = [launch for launch in sm_90.launches if launch.kernel == "bwd_sum_dbias"]
        assert len(sums) == (expected[1] and bias.shape != whole.shape), "a kernel sums the terms of a shared bias"
        for launch in sums:
            assert launch["dbias_sum"].shape == bias.shape
            assert launch["dbias_terms"].data_ptr() == sm_90.main["dbias"].data_ptr()
    check(whole, {}, (True, False, False))
    check(whole, {"needs_grad": (True,)}, (True, True, False), width=192)
    shared = torch.zeros(1, 4, 30, 64).bfloat16()
    check(shared, {"needs_grad": (True,)}, (True, True, False), width=192)
    check(whole, {"needs_grad": (True,), "deterministic": True}, (True, False, False), width=192)
    # Kernels write no zeros in blocks that a band excludes, and the sum does not read them.
    for sizes, bounds, omits in (
        ((1, 4), {"right": 0}, True),
        ((2, 1), {"left": 3, "right": 2}, True),
        ((1, 4), {"attention_chunk": 100}, True),
        ((1, 4), {}, False),
        ((2, 4), {"right": 0}, False),
    ):
        bias = torch.zeros(*sizes, 300, 264).bfloat16()
        check(bias, {"needs_grad": (True,), **bounds}, (True, True, False))
        assert sm_90.main.key.static.mods.dbias_terms == omits
    # Without TMA, the kernel adds to the gradient of a shared bias.
    check(shared, {"needs_grad": (True,), "kernel_family": "sm80"}, (False, False, True))


@pytest.mark.parametrize("name", ["capped", "tables", "own gradient", "all"])
def test_deterministic_gradients_of_tables(gpu: FakeGpu, name: str) -> None:
    """The kernel stores a term for each score, and torch sums the terms."""
    run_gradients(CASES[name], deterministic=True)
    terms, elements = gpu.main["dcapture_terms"]
    assert gpu.main.kernel == "bwd_sm80" and terms.shape == elements.shape == (len(terms), B, H, SQ, SK)
    if gpu.family == "sm90":
        with pytest.raises(UnsupportedError, match="without gradients of captured tensors"):
            run_gradients(CASES[name], deterministic=True, kernel_family="sm90")


def test_deterministic_gradients_of_tables_of_varlen_batches_are_refused(gpu: FakeGpu) -> None:
    lengths = Lengths([30, 0, 50], [40, 5, 50])
    inputs = [normal(n, 2, 16, seed=i) for i, n in enumerate((80, 95, 95))]
    args = VARLEN_CASES["tables"].args(inputs, **lengths.args(), deterministic=True)
    with pytest.raises(UnsupportedError, match="deterministic gradients of tensors that score_mod captures"):
        run_backward(inputs, args)
    run_backward(inputs, VARLEN_CASES["mask"].args(inputs, **lengths.args(), deterministic=True))


def test_nothing_to_launch(gpu: FakeGpu) -> None:
    inputs = tensors()
    inputs[0] = inputs[0][:, :, :0]
    grads = run_gradients(Case(with_tables, bias=(B, H, 1, SK)), inputs)
    assert gpu.launches == [] and not grads[5].any()


def test_block_masks_of_other_blocks_are_refused(gpu: FakeGpu) -> None:
    block_mask = BlockMask.of(by_head, (B, H, SQ, SK), tile=(96, 96))
    args = call_args(tensors()[0], mask_mod=by_head, block_mask=block_mask)
    with pytest.raises(UnsupportedError, match=r"block_mask of blocks of 96 x 96"):
        run_backward(tensors(), args)


def test_block_indices_are_computed_once(gpu: FakeGpu) -> None:
    args = Case(None, by_head, has_block_mask=True).args(tensors())
    lists = []
    for _ in range(2):
        run_forward(tensors(), args)
        lists.append(gpu.main["block_indices"])
        run_backward(tensors(), args)
        lists.append(gpu.main["block_indices"])
    assert lists[0] is lists[2] and lists[1] is lists[3]


@pytest.mark.parametrize(
    ("head_dim", "family", "deterministic", "begins_apart"),
    [(64, "sm90", False, True), (128, "", False, True), (64, "sm90", True, False), (256, "sm90", False, False),
     (64, "sm80", False, False)],
)  # fmt: skip
def test_tiles_begin_apart_where_any_order_is_right(
    sm_90: FakeGpu, head_dim: int, family: str, deterministic: bool, begins_apart: bool
) -> None:
    """All K/V tiles visit all m_blocks; the first entry of each list is the block that it visits first."""
    qkv = [normal(1, 1, 512, head_dim, seed=i) for i in range(3)]
    mask = BlockMask.of(lambda b, h, q, kv: q >= 0, (1, 1, 512, 512))
    run_backward(qkv, call_args(qkv[0], block_mask=mask, kernel_family=family, deterministic=deterministic))
    first = sm_90.main["block_indices"][1][0, 0, :, 0]
    assert first.numel() > 2 and first.unique().numel() == (first.numel() if begins_apart else 1)


def of_sequence(score, b, h, q, kv):
    return score * FACTORS[b] + TABLE[h, (q - kv).abs() // STEP] - OF_KEYS[kv] * ONE


def in_sequence(b, h, q, kv):
    return FLAGS[kv] & (kv <= q + 10 * b)


VARLEN_CASES = {
    "capped": Case(capped),
    "tables": Case(of_sequence, window=(None, 0)),
    "own gradient": Case(capped, score_mod_bwd=doubled),
    "mask": Case(None, in_sequence),
    "mask and window": Case(of_sequence, in_sequence, window=(100, 20)),
    "all": Case(of_sequence, in_sequence, fields=FEATURES, window=(100, 20)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", VARLEN_CASES.values(), ids=VARLEN_CASES)
def test_varlen_gradients(gpu: FakeGpu, case: Case) -> None:
    """Positions count from the start of the sequence, and b is its index; tables get the sum over all sequences."""
    for lengths in (
        Lengths([150, 0, 33, 1], [200, 7, 0, 130], None, (5, 9)),
        Lengths([40, 129, 64], [333, 64, 70], [300, 0, 70]),
    ):
        (sq, sk), width = lengths.totals, 16
        inputs = [normal(n, heads, width, seed=i) for i, (n, heads) in enumerate(((sq, H), (sk, HKV), (sk, HKV)))]
        for has_dlse in (False, True):
            dlse = normal(H, sq, seed=6, dtype=torch.float32) if has_dlse else None
            run_backward(inputs, case.args(inputs, **lengths.args()), dlse=dlse, atol=0.03)
        assert gpu.main.kernel == f"bwd_{gpu.family}" and gpu.main.key.static.varlen
        assert gpu.main.key.static.has_mods


def test_varlen_gradients_of_wide_heads(gpu: FakeGpu) -> None:
    lengths = Lengths([30, 0, 50], [40, 5, 50])
    inputs = [normal(n, 2, 192, seed=i) for i, n in enumerate((80, 95, 95))]
    run_backward(inputs, VARLEN_CASES["tables"].args(inputs, **lengths.args()), atol=0.03)
    assert gpu.main.kernel == ("bwd_sm80" if gpu.family == "sm80" else "bwd_sm90_wide")


# ---- signatures

ONE_CALL = Case(with_tables, masks.causal(), (1, H, SQ, SK), torch.float32)


def right(**fields: Any) -> tuple[list[Tensor], AttentionArgs]:
    """A valid call with a bias, captures and a block mask for every batch and head."""
    args = ONE_CALL.args(tensors(), **fields)
    return tensors(), with_block_mask(block_mask_of())(args)


def block_mask_of(batch: int = B, heads: int = H, sq: int = SQ, sk: int = SK) -> BlockMask:
    one = BlockMask.of(masks.causal(), (batch, heads, sq, sk))
    return BlockMask.of_status(one.status.expand(batch, heads, -1, -1), 128, 128, sq, sk)


def with_block_mask(mask: BlockMask) -> Callable[[AttentionArgs], AttentionArgs]:
    return with_args(block_mask=mask.tensors, block_mask_sizes=mask.sizes)


def moved(mask: BlockMask, device: str) -> BlockMask:
    return BlockMask.of_tensors([x.to(device) for x in mask.tensors], list(mask.sizes))


def with_args(**fields: Any) -> Callable[[AttentionArgs], AttentionArgs]:
    return lambda args: args._replace(**fields)


def with_bias(change: Callable[[Tensor], Tensor]) -> Callable[[AttentionArgs], AttentionArgs]:
    return lambda args: args._replace(bias=change(args.bias))  # type: ignore[arg-type]


def with_tensor(position: int, change: Callable[[Tensor], Tensor]) -> tuple[int, Callable[[Tensor], Tensor]]:
    return position, change


META = [x.to("meta") for x in ONE_CALL.args(tensors()).captures]
# Each call differs in one point from a valid call.
WRONG: dict[str, tuple[Any, str]] = {
    "bias of more keys": (with_bias(lambda x: torch.cat([x, x], 3)), "does not broadcast with"),
    "bias of fewer queries": (with_bias(lambda x: x[:, :, 1:]), "does not broadcast with"),
    "bias of two heads": (with_bias(lambda x: x[:, :2]), "does not broadcast with"),
    "bias of three batches": (with_bias(lambda x: x.expand(3, -1, -1, -1)), "does not broadcast with"),
    "bias of ints": (with_bias(lambda x: x.to(torch.int64)), "bias is torch.int64"),
    "block mask of more queries": (with_block_mask(block_mask_of(sq=SQ + 1)), f"block_mask has {SQ + 1} queries"),
    "block mask of fewer keys": (with_block_mask(block_mask_of(sk=SK - 10)), f"and {SK - 10} keys"),
    "block mask of three batches": (with_block_mask(block_mask_of(batch=3)), "block_mask has batch=3"),
    "block mask of two heads": (with_block_mask(block_mask_of(heads=2)), "block_mask has heads=2"),
    "k of another dtype": (with_tensor(1, Tensor.half), "k is torch.float16 and q is torch.bfloat16"),
    "v of another dtype": (with_tensor(2, Tensor.float), "v is torch.float32 and q is torch.bfloat16"),
    "k of other lengths": (with_tensor(1, lambda x: x[:, :, 1:]), "all dimensions but the last must agree"),
    "q of fewer heads": (with_tensor(0, lambda x: x[:, :3]), "q has 3 heads"),
    "q of fewer queries": (with_tensor(0, lambda x: x[:, :, 1:]), "does not broadcast with"),
    "q of another width": (with_tensor(0, lambda x: x[..., :8]), "batch and head dim must agree"),
    "scale of NaN": (with_args(scale=float("nan")), "scale=nan is not finite"),
    "a negative window": (with_args(window_left=-1), "window left=-1 is negative"),
    "a negative softcap": (with_args(softcap=-1.0), "softcap=-1.0"),
    "slopes of two heads": (with_args(alibi=torch.ones(2)), "alibi has shape"),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_bias(lambda x: x.to("meta")), "bias is on meta"),
        (with_block_mask(moved(block_mask_of(), "meta")), "block_mask is on meta"),
        (with_args(captures=tuple(META)), "a captured tensor is on meta"),
        (with_args(alibi=torch.ones(H, device="meta")), "alibi is on meta"),
    ],
    ids=["bias", "block_mask", "captures", "alibi"],
)
def test_tensors_on_another_device_are_refused(gpu: FakeGpu, change: Callable, message: str) -> None:
    qkv, args = right()
    with pytest.raises(ValueError, match=message):
        launcher.forward(*qkv, change(args))
    assert gpu.keys == []


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused_after_a_right_one(gpu: FakeGpu, name: str) -> None:
    change, message = WRONG[name]
    qkv, args = right()
    out, lse, _ = run_forward(qkv, args)
    if isinstance(change, tuple):
        qkv[change[0]] = change[1](qkv[change[0]])
    else:
        args = change(args)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            launcher.forward(*qkv, args)
        with pytest.raises(ValueError, match=message):
            launcher.backward(out, None, *qkv, out, lse, args)
    assert len(gpu.launches) == 1, "nothing was launched"
    run_forward(*right())


def test_right_calls_are_bound_once(gpu: FakeGpu) -> None:
    qkv, args = right()
    run_forward(qkv, args)
    # Other values, of the same shapes.
    for other in (
        with_bias(torch.neg)(args),
        with_args(captures=tuple(-x if x.is_floating_point() else x for x in args.captures))(args),
        with_block_mask(block_mask_of())(args),
    ):
        run_forward(qkv, other)
    assert len(bound) == len(gpu.keys) == 1


def test_slopes_are_in_the_signature(gpu: FakeGpu) -> None:
    run_forward(*right(alibi=torch.ones(H)))
    with pytest.raises(ValueError, match="alibi"):
        launcher.forward(*right()[0], right(alibi=torch.ones(H + 1))[1])


def test_a_bias_and_a_block_mask_of_varlen_batches_are_refused(gpu: FakeGpu) -> None:
    q, k, v = (normal(10, heads, D, seed=i) for i, heads in enumerate((H, HKV, HKV)))
    offsets = torch.tensor([0, 4, 10], dtype=torch.int32)
    for name, fields in (("bias", {"bias": torch.ones(1)}), ("block_mask", {"block_mask": block_mask_of()})):
        args = call_args(q, **fields, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        with pytest.raises(UnsupportedError, match=f"{name} in a varlen batch"):
            launcher.forward(q, k, v, args)


def test_calls_that_differ_in_one_thing_have_signatures_of_their_own(gpu: FakeGpu) -> None:
    qkv = inputs()
    heads, sq, sk = qkv[0].shape[1], qkv[0].shape[2], qkv[1].shape[2]
    bias, table = normal(heads, 1, sk, dtype=torch.float32), normal(heads, sk, dtype=torch.float32)

    def scored(table: Tensor) -> Callable:
        return lambda score, b, h, q, kv: score + table[h, kv]

    fields: tuple[dict[str, Any], ...] = ({}, {"window_left": 3}, {"softcap": 1.0}, {"return_max_logit": True})
    choices: dict[str, tuple[Any, ...]] = {
        "bias": (None, bias, bias.half(), bias.clone().requires_grad_()),
        "score_mod": (None, *map(scored, (table, table.half(), table.clone().requires_grad_()))),
        "block_mask": (None, BlockMask.of(masks.causal(), (2, heads, sq, sk))),
    }
    # Calls that differ from a plain call in one or two of fields, bias, score_mod and block mask.
    calls = [
        {**own, **dict(zip(choices, values, strict=True))}
        for own, values in itertools.product(fields, itertools.product(*choices.values()))
        if bool(own) + sum(x is not None for x in values) <= 2
    ]
    with torch.no_grad():
        for keywords in calls * 2:
            run_forward(qkv, call_args(qkv[0], mask_mod=masks.causal(), **keywords))
    assert len(bound) == len(calls)


def test_gradients_of_large_captures_are_refused(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_CAPTURE_ELEMENTS", 3)
    args = Case(capped).args(tensors())
    out, lse, _ = cpu.forward(*tensors(), args)
    with pytest.raises(
        UnsupportedError,
        match=r"the gradient of a captured tensor of shape .* on cuda: give it at most 3 elements, or detach it",
    ):
        launcher.backward(out, None, *tensors(), out, lse, args)
