"""score_mod, mask_mod, bias and block masks on a GPU, by every family: against the fp64 oracle and against
FlexAttention with the same functions.
"""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cute_flash
from cute_flash import BlockMask, UnsupportedError, api, masks, reference
from tests import cases, mod_cases
from tests.mod_cases import Case, Kind, Sizes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]


@pytest.mark.parametrize("case", mod_cases.cases(), ids=lambda case: case.id)
def test_against_the_oracle(case: Case) -> None:
    q, k, v = case.inputs()
    out, lse, *most = cute_flash.attn(q, k, v, return_lse=True, **case.options)
    exact = reference.dense(q, k, v, args=case.args())
    low, _ = reference.dense_low_precision(q, k, v, args=case.args())
    # Captured tensors and the bias have the same precision on both sides.
    cases.assert_close(out, lse, *exact, low)
    assert len(most) == ("return_max_logit" in case.options)


FLEX = [
    Kind(64, score="alibi"),
    Kind(128, score="relative"),
    Kind(128, score="capped", mask="document"),
    Kind(64, mask="prefix"),
    Kind(128, score="gated", mask="window"),
]


@pytest.mark.parametrize("kind", FLEX, ids=lambda kind: kind.id)
def test_against_flex_attention(kind: Kind) -> None:
    case = Case(kind, Sizes(2, 4, 2, 256, 384), seed=2)
    q, k, v = case.inputs()
    score_mod, mask_mod = (case.options.get(name) for name in ("score_mod", "mask_mod"))
    block_mask: Any = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, 2, 4, 256, 384, device="cuda")
    wide = (x.double() for x in (q, k, v))
    expected = flex_attention(*wide, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
    out, lse = cute_flash.attn(q, k, v, return_lse=True, score_mod=score_mod, mask_mod=mask_mod)
    low, _ = reference.dense_low_precision(q, k, v, args=case.args())
    seen = (lse != -torch.inf)[..., None]
    cases.assert_error_within("out", out, expected.masked_fill(~seen, 0.0), low)


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


def test_new_captured_values_compile_nothing() -> None:
    case = Case(Kind(64, score="alibi", mask="window"), Sizes(1, 2, 2, 200, 200))
    q, k, v = case.inputs()
    slopes = torch.rand(2, device="cuda")

    def run(width: int) -> torch.Tensor:
        def score_mod(score, b, h, q_idx, kv_idx):
            return score - slopes[h] * (q_idx - kv_idx).abs()

        return cute_flash.attn(q, k, v, score_mod=score_mod, mask_mod=masks.sliding_window(width))

    first = run(20)
    from cute_flash.jit.compile import cache_info

    before = cache_info()
    second = run(30)
    assert not torch.equal(first, second) and cache_info().compiles == before.compiles
    slopes.zero_()
    torch.testing.assert_close(run(200), cute_flash.attn(q, k, v, causal=True), rtol=2e-2, atol=1e-2)


def test_varlen() -> None:
    """Mods get positions within the sequence, and its index."""
    lengths = [100, 0, 257, 31]
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    q, k, v = (torch.randn(sum(lengths), 2, 64, device="cuda").bfloat16() for _ in range(3))
    table = torch.randn(4, 2, device="cuda")

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * table[b, h] - (q_idx - kv_idx).abs() * 0.02

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) | (kv_idx < 5 + b)

    out = cute_flash.attn_varlen(q, k, v, offsets, offsets, score_mod=score_mod, mask_mod=mask_mod)
    for i, length in enumerate(lengths):
        if length:
            rows = slice(int(offsets[i]), int(offsets[i]) + length)
            one = [x[rows].transpose(0, 1)[None].float() for x in (q, k, v)]
            row, prefix = table[i].cpu(), 5 + i

            def own_score(score, b, h, q_idx, kv_idx, row=row):
                return score * row[h] - (q_idx - kv_idx).abs() * 0.02

            def own_mask(b, h, q_idx, kv_idx, prefix=prefix):
                return (kv_idx <= q_idx) | (kv_idx < prefix)

            wide = (x.cpu() for x in one)
            expected = cute_flash.attn(*wide, score_mod=own_score, mask_mod=own_mask)
            torch.testing.assert_close(out[rows].transpose(0, 1).float().cpu(), expected[0], rtol=2e-2, atol=1e-2)


def test_same_input_same_bits() -> None:
    case = Case(mod_cases.KINDS[-3], Sizes(2, 8, 2, 500, 700), seed=3)
    q, k, v = case.inputs()
    first = cute_flash.attn(q, k, v, return_lse=True, **case.options)
    for _ in range(5):
        again = cute_flash.attn(q, k, v, return_lse=True, **case.options)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


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
