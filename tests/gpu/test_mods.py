"""score_mod, mask_mod, bias and block masks on a GPU, by every family: results and gradients against the fp64 oracle,
the CPU path and torch's FlexAttention with the same functions.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cute_flash
from cute_flash import BlockMask, UnsupportedError, api, masks, reference
from cute_flash.jit.kernels import cache_info
from cute_flash.planning.plan import CompileKey
from cute_flash.spec.arch import ArchSpec, detect
from cute_flash.spec.family import FAMILIES
from tests import cases, mod_cases, mod_gradients
from tests.covering import covering
from tests.fakes.recording import forward_keys
from tests.feature_gradients import assert_outputs
from tests.lengths import Lengths
from tests.mod_cases import Case, Kind, Sizes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]


# ---- many calls


def properties(kind: Kind) -> tuple[Any, ...]:
    return (
        kind.head_dim, kind.head_dim_v, kind.score, kind.mask, kind.bias, kind.bounds, kind.has_block_mask,
        kind.has_pairs, kind.is_aligned, kind.dtype, tuple(kind.more),
    )  # fmt: skip


def by_families(items: list[Any], properties: Any) -> list[Any]:
    """Parameters of some of the cases with some of the families: any two properties meet."""
    both = covering(list(itertools.product(items, FAMILIES)), lambda item: (item[1], *properties(item[0])))
    return [pytest.param(case, family, id=f"{family}-{case.id}") for case, family in both]


KINDS = by_families(mod_gradients.KINDS, properties)
VARLEN = by_families(mod_cases.varlen_cases(), lambda case: (case.seed, *properties(case.kind)))
DETERMINISTIC = by_families(
    mod_gradients.deterministic_cases("cuda"),
    lambda case: (isinstance(case, mod_cases.VarlenCase), *properties(case.kind)),
)


def sampled(kind: Kind, family: str, arch: ArchSpec, device: str = "cuda") -> list[tuple[Case, list[CompileKey]]]:
    """Every other case of a kind, and the last one, which has many more tiles than SMs; with their kernels."""
    return list(mod_gradients.chosen(arch, family, device, [kind]))[::-2]


def keys(arch: ArchSpec, runnable: list[str]) -> Iterator[CompileKey]:
    """The kernels of these calls and of their gradients."""
    for kind, family in (param.values for param in KINDS if param.values[1] in runnable):
        for case, backward in sampled(kind, family, arch, "cpu"):
            yield from forward_keys(*case.uninitialized_inputs(), case.args(kernel_family=family), arch)
            yield from backward
    for param in (*VARLEN, *DETERMINISTIC):
        case, family = param.values
        if family in runnable:
            case = replace(case, device="cpu")
            yield from forward_keys(*case.uninitialized_inputs(), case.args(kernel_family=family), arch)
            yield from kernels_of(case, family, param in DETERMINISTIC)


def kernels_of(case: Case, family: str, deterministic: bool = False) -> list[CompileKey]:
    try:
        return mod_gradients.keys_of(replace(case, device="cpu"), detect(0), family, deterministic)
    except UnsupportedError:
        return []


@pytest.mark.parametrize(("kind", "family"), KINDS, indirect=["family"])
def test_against_the_oracle(kind: Kind, family: str) -> None:
    for case, backward in sampled(kind, family, detect(0)):
        if backward:
            mod_gradients.assert_gradients(case)
        else:
            # Long score_mods.
            assert_forward(case)
            with pytest.raises(UnsupportedError, match=r"the gradient of attn with .*score_mod"):
                mod_gradients.assert_gradients(case)


def assert_forward(case: Case) -> None:
    q, k, v = case.inputs()
    outs = case.attend(q, k, v)
    assert_outputs(outs, *(by(q, k, v, args=case.args()) for by in (reference.dense, reference.dense_low_precision)))


@pytest.mark.parametrize(("case", "family"), VARLEN, indirect=["family"])
def test_varlen_cases(case: mod_cases.VarlenCase, family: str) -> None:
    """Odd lengths, empty sequences, padding, grouped heads; rows that belong to no sequence hold NaN."""
    if not kernels_of(case, family):
        # Long score_mods.
        assert family == "sm90" and case.kind.score in ("gated", "hiding")
        with pytest.raises(cute_flash.UnsupportedError, match="the gradient of attn_varlen with score_mod"):
            mod_gradients.assert_gradients(case)
        return
    found = mod_gradients.assert_gradients(case)
    real, unused = sum(case.lengths.queries), case.lengths.unused_keys().cuda()
    assert not found["q"][real:].any(), "dq of padding"
    assert not found["k"][unused].any() and not found["v"][unused].any(), "dk, dv of keys that belong to no sequence"


@pytest.mark.parametrize(("case", "family"), DETERMINISTIC, indirect=["family"])
def test_deterministic_gradients_have_the_same_bits(case: Case, family: str) -> None:
    if not kernels_of(case, family, deterministic=True):
        # Gradients of captured tensors, and long score_mods.
        assert family == "sm90" and case.kind.score
        with pytest.raises(cute_flash.UnsupportedError, match="deterministic"):
            mod_gradients.assert_gradients(case, deterministic=True)
        return
    mod_gradients.assert_gradients(case, deterministic=True)
    leaves, douts = mod_gradients.leaves_of(case), mod_gradients.douts_of(case)
    first = None
    for _ in range(5):
        outs = case.attend(*(leaves[name] for name in "qkv"), deterministic=True)
        found = mod_gradients.gradients(outs, douts, leaves)
        first = first or found
        assert all(torch.equal(found[name], first[name]) for name in leaves)


# ---- beside FlexAttention


FLEX = [
    (Kind(64, score="alibi"), Sizes(2, 4, 2, 256, 384)),
    (Kind(128, score="capped", mask="document"), Sizes(2, 4, 2, 256, 384)),
    # Not "gated": torch's gradient fails for a captured number.
    (Kind(128, score="alibi", mask="window"), Sizes(2, 4, 2, 256, 384)),
    (Kind(128, score="relative", bounds=(False, True)), Sizes(2, 4, 4, 384, 384)),
    (Kind(64, mask="prefix"), Sizes(2, 4, 4, 384, 384)),
]


@pytest.mark.parametrize(("kind", "sizes"), FLEX, ids=lambda x: x.id if isinstance(x, Kind) else "")
def test_as_flex_attention(kind: Kind, sizes: Sizes, family: str) -> None:
    """The same mods, within the rounding errors of 16-bit products and sums."""
    case = Case(kind, sizes, 2)
    leaves, (dout, _) = mod_gradients.leaves_of(case), mod_gradients.douts_of(case)
    options = case.options
    mask_mod, right = options.get("mask_mod"), options["window"][1]
    seen = mask_mod if right is None else lambda b, h, q, kv: kv <= q + right
    shape = sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k
    block_mask = None if seen is None else create_block_mask(seen, *shape, device="cuda")
    q, k, v = (leaves[name] for name in "qkv")
    wide = (x.double() for x in (q, k, v))
    theirs = flex_attention(*wide, score_mod=options.get("score_mod"), block_mask=block_mask, enable_gqa=True)
    mine, lse = cute_flash.attn(q, k, v, return_lse=True, **options)
    low, _ = reference.dense_low_precision(q, k, v, args=case.args())
    is_empty = (lse == -torch.inf)[..., None]
    cases.assert_error_within("out", mine, theirs.masked_fill(is_empty, 0.0), low)
    if not kernels_of(case, family):
        return
    names = [name for name in leaves if name in "qkv" or name.startswith("capture")]
    of = [leaves[name] for name in names]
    expected = torch.autograd.grad((theirs * dout.double()).sum(), of)
    found = torch.autograd.grad((mine * dout).sum(), of)
    of_delta = errors_of_rounded_delta(case, names)
    for name, x, y, z in zip(names, found, expected, of_delta, strict=True):
        size, error, rounding = (one.double().square().mean().sqrt().item() for one in (y, x.double() - y.double(), z))
        assert error <= 0.02 * size + 2 * rounding + 1e-4, f"d{name}: {error:.3e} of {size:.3e}"


def errors_of_rounded_delta(case: Case, names: list[str]) -> tuple[Tensor, ...]:
    """The errors of gradients from Δ, the row sum of dO · O, which kernels compute from the rounded output.

    An error of Δ acts on the scores as a gradient of the LSE does. It sums up in gradients of captured numbers, whose
    other terms cancel. Computed by the CPU path.
    """
    case = replace(case, device="cpu")
    leaves, (dout, _) = mod_gradients.leaves_of(case), mod_gradients.douts_of(case)
    q, k, v = (leaves[name] for name in "qkv")
    out, lse = cute_flash.attn(*(x.double() for x in (q, k, v)), return_lse=True, **case.options)
    error = ((out.to(q.dtype).double() - out).detach() * dout.double()).sum(-1)
    loss = (lse.masked_fill(lse == -torch.inf, 0.0) * error).sum()
    return torch.autograd.grad(loss, [leaves[name] for name in names], materialize_grads=True, allow_unused=True)


# ---- block masks


@pytest.mark.parametrize("head_dim", (64, 128))
def test_a_block_mask_changes_nothing(head_dim: int) -> None:
    """Blocks of the default size and larger; with a window that the block mask contains, and one that it does not."""
    case = Case(Kind(head_dim, mask="document"), Sizes(2, 4, 2, 700, 900), seed=4)
    q, k, v = case.inputs()
    mask, shape = case.options["mask_mod"], (2, 4, 700, 900)
    for causal in (False, True):
        expected, expected_lse = cute_flash.attn(q, k, v, mask_mod=mask, causal=causal, return_lse=True)
        for tile, knows in (((128, 128), causal), ((128, 128), False), ((256, 384), causal)):
            block_mask = BlockMask.of(mask, shape, tile=tile, causal=knows, device="cuda")
            out, lse = cute_flash.attn(q, k, v, mask_mod=mask, causal=causal, block_mask=block_mask, return_lse=True)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)


def test_a_block_mask_from_a_status_table() -> None:
    """Full blocks do not evaluate mask_mod, empty blocks are skipped; without a mask_mod partial blocks are full."""
    case = Case(Kind(128), Sizes(1, 2, 2, 300, 400), seed=1)
    q, k, v = case.inputs()
    status = torch.tensor([[0, 2, 1, 0], [0, 0, 0, 0], [1, 0, 2, 1]], dtype=torch.uint8, device="cuda")
    block_mask = BlockMask.of_status(status[None, None], 128, 128, 300, 400)
    out, lse = cute_flash.attn(q, k, v, block_mask=block_mask, return_lse=True)
    i, j = (torch.arange(n, device="cuda") // 128 for n in (300, 400))
    seen = status[i][:, j] > 0
    bias = torch.zeros(300, 400, device="cuda").masked_fill(~seen, -torch.inf)
    wide = (x.double().cpu() for x in (q, k, v))
    expected, expected_lse = cute_flash.attn(*wide, bias=bias.double().cpu(), return_lse=True)
    assert (out[:, :, 128:256] == 0).all() and (lse[:, :, 128:256] == -torch.inf).all()
    rows = [*range(128), *range(256, 300)]
    torch.testing.assert_close(out[:, :, rows].double().cpu(), expected[:, :, rows], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse[:, :, rows].double().cpu(), expected_lse[:, :, rows], rtol=1e-5, atol=5e-5)
    with pytest.raises(UnsupportedError, match="block_mask of blocks of 16 x 16"):
        cute_flash.attn(q, k, v, block_mask=BlockMask.of(None, (1, 2, 300, 400), tile=(16, 16), device="cuda"))


# ---- captured tensors


def test_new_captured_values_compile_nothing() -> None:
    case = Case(Kind(64, score="alibi", mask="window"), Sizes(1, 2, 2, 200, 200))
    q, k, v = case.inputs()
    slopes = torch.rand(2, device="cuda")

    def run(width: int) -> torch.Tensor:
        def score_mod(score, b, h, q_idx, kv_idx):
            return score - slopes[h] * (q_idx - kv_idx).abs()

        return cute_flash.attn(q, k, v, score_mod=score_mod, mask_mod=masks.sliding_window(width))

    first = run(20)
    before = cache_info()
    second = run(30)
    assert not torch.equal(first, second) and cache_info().compiles == before.compiles
    slopes.zero_()
    torch.testing.assert_close(run(200), cute_flash.attn(q, k, v, causal=True), rtol=2e-2, atol=1e-2)


def test_a_table_by_sequence_gets_nothing_from_other_sequences() -> None:
    """NaN in one sequence reaches its own entry of the table, and no other."""
    lengths = Lengths([100, 0, 257, 31], [90, 4, 300, 0])
    q, k, v = (torch.randn(n, 2, 64, device="cuda").bfloat16() for n in (388, 394, 394))
    table = torch.randn(4, 2, device="cuda")

    def grads(dout):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, table)]
        gate = leaves[3]
        options = {**lengths.args("cuda"), "score_mod": lambda score, b, h, q, kv: score * gate[b, h]}
        out = cute_flash.attn_varlen(*leaves[:3], **options)
        return torch.autograd.grad(out, leaves, dout)

    dout = torch.randn_like(q)
    *_, expected = grads(dout)
    poisoned = dout.clone()
    poisoned[100:] = torch.nan
    dq, dk, dv, found = grads(poisoned)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-3)
    assert found[2].isnan().all() and expected[0].any() and expected[2].any()
    # Sequences without queries, or without keys.
    assert not expected[1].any() and not expected[3].any() and not found[1].any() and not found[3].any()
    assert all(x[:90].isfinite().all() for x in (dq, dk, dv))


def test_functions_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same dropout mask, forward and gradients equal those of the CPU path, with and without a block mask."""
    rng = torch.tensor([123456789123, 42])
    monkeypatch.setattr(api, "_seed", lambda q: rng.to(q.device))
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(2, heads, 300, 128, generator=generator).bfloat16() for heads in (4, 2, 2)]
    mask = masks.sliding_window(70)
    for has_block_mask in (False, True):
        found = []
        for device in ("cuda", "cpu"):
            q, k, v = (x.to(device).requires_grad_() for x in inputs)
            given: dict[str, Any] = {"mask_mod": mask}
            if has_block_mask:
                given["block_mask"] = BlockMask.of(mask, (2, 4, 300, 300), device=device)
            out = cute_flash.attn(q, k, v, dropout=0.3, **given)
            dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
            found.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
        for mine, theirs in zip(*found, strict=True):
            error = (mine.detach().cpu().float() - theirs.detach().float()).norm() / theirs.float().norm()
            assert error < 1e-2


def test_rows_without_keys() -> None:
    """dq and the gradient of the bias are exactly 0 in rows without visible keys."""
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    bias = torch.randn(1, 2, 200, 200, device="cuda", requires_grad=True)
    out = cute_flash.attn(q, k, v, bias=bias, mask_mod=lambda b, h, q, kv: (q % 3 > 0) & (kv < 150))
    dq, dk, dv, dbias = torch.autograd.grad(out.float().square().sum(), (q, k, v, bias))
    assert not dq[:, :, ::3].any() and not dbias[:, :, ::3].any() and not dbias[..., 150:].any()
    assert not dk[:, :, 150:].any() and not dv[:, :, 150:].any()
    assert dq[:, :, 1::3].any() and dbias.isfinite().all()


def test_tensors_without_influence_have_a_gradient_of_0() -> None:
    """A bias that the score_mod ignores, dense and varlen, and a table whose values it rounds."""
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    bias, table = (
        torch.randn(2, 200, 200, device="cuda").requires_grad_(),
        torch.ones(2, device="cuda").requires_grad_(),
    )
    offsets = torch.tensor([0, 60, 200], device="cuda", dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    keywords = {"bias": bias, "score_mod": lambda s, b, h, i, j: 0.1 * (i - j) + torch.floor(table[h])}
    outs = (
        cute_flash.attn(q, k, v, **keywords),
        cute_flash.attn_varlen(*packed, offsets, offsets, max_seqlen_q=200, max_seqlen_k=200, **keywords),
    )
    for out in outs:
        dq, dv, dbias, dtable = torch.autograd.grad(out.float().square().sum(), (q, v, bias, table))
        assert not dq.any() and not dbias.any() and not dtable.any() and dv.any()


# ---- the gradient of a bias


@pytest.mark.parametrize("shape", [(4, 300, 300), (3, 1, 1, 300), (1, 300)], ids=str)
def test_bias_of_varlen_batches(shape: tuple[int, ...]) -> None:
    """The bias of each sequence's own positions, with its gradient, as on the CPU in fp64."""
    lengths = Lengths([100, 300, 31], [90, 257, 300])
    sizes = ((431, 4), (647, 2), (647, 2))
    tensors = [torch.randn(*size, 64, device="cuda").bfloat16() for size in sizes]
    tensors.append(torch.randn(shape, device="cuda"))
    dout = torch.randn(431, 4, 64, device="cuda").bfloat16()

    def gradients(device, dtype):
        leaves = [x.to(device, dtype or x.dtype).requires_grad_() for x in tensors]
        q, k, v, bias = leaves
        bounds = {"max_seqlen_q": 300, "max_seqlen_k": 300}
        options = {**lengths.args(device), **bounds, "bias": bias, "causal": True}
        out = cute_flash.attn_varlen(q, k, v, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(device, dtype or dout.dtype))]

    for found, expected in zip(gradients("cuda", None), gradients("cpu", torch.float64), strict=True):
        error = (found.double().cpu() - expected).abs().max().item()
        assert error <= 0.02 * expected.abs().max().item()


WINDOWS = ((None, 0), (100, 30), (None, 5), (64, None), (None, None))
SIZES = (
    (2, 4, 4, 512, 512), (1, 4, 2, 1000, 1000), (2, 2, 1, 256, 1024), (1, 2, 2, 1024, 256), (3, 1, 1, 1024, 256),
    (2, 4, 2, 64, 640),
)  # fmt: skip


BIASES = covering(list(itertools.product(FAMILIES, (64, 128, 192, 256), SIZES, WINDOWS)), tuple)


@pytest.mark.parametrize(("family", "head_dim", "size", "window"), BIASES, ids=str, indirect=["family"])
def test_the_gradient_of_a_bias_is_written_everywhere(head_dim, size, window):
    """Blocks that a band excludes have a gradient of 0; K/V tiles without queries, grouped heads, shared biases."""
    batch, heads, heads_kv, sq, sk = size
    generator = torch.Generator("cuda").manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()

    q, dout = normal(batch, heads, sq, head_dim), normal(batch, heads, sq, head_dim).detach()
    k, v = normal(batch, heads_kv, sk, head_dim), normal(batch, heads_kv, sk, head_dim)
    for bias_batch, bias_heads in ((batch, heads), (1, heads), (batch, 1), (1, 1)):
        bias = normal(bias_batch, bias_heads, sq, sk)
        scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double().repeat_interleave(heads // heads_kv, 1))
        scores = scores * head_dim**-0.5 + bias.double()
        offset = torch.arange(sk, device="cuda")[None] - torch.arange(sq, device="cuda")[:, None] - (sk - sq)
        left, right = window
        hidden = torch.zeros_like(offset, dtype=torch.bool)
        hidden |= offset < -left if left is not None else False
        hidden |= offset > right if right is not None else False
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
        out = torch.einsum("bhqk,bhkd->bhqd", weights, v.double().repeat_interleave(heads // heads_kv, 1))
        leaves = q, k, v, bias
        expected = torch.autograd.grad(out, leaves, dout.double())
        found = torch.autograd.grad(cute_flash.attn(q, k, v, bias=bias, window=window), leaves, dout)
        for x, y in zip(found, expected, strict=True):
            assert (x - y).abs().max() <= 0.02 * y.abs().max()
        assert not found[3][..., hidden].any()
