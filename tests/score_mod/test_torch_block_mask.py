"""`attn(block_mask=)` with FlexAttention's block masks: their conversion, its cache, and errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import create_block_mask

import cute_flash
from cute_flash.score_mod import torch_block_mask
from cute_flash.score_mod.block_mask import BlockMask
from cute_flash.score_mod.torch_block_mask import convert

IDS = torch.tensor([0, 0, 1] * 20)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return IDS[q_idx] == IDS[kv_idx]


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 8 - kv_idx // 8) % 3 == h + b


def create(mask_mod: Any, sq: int, sk: int, block_size: Any = 16, **keywords: Any) -> TorchBlockMask:
    return create_block_mask(mask_mod, 2, 3, sq, sk, device="cpu", BLOCK_SIZE=block_size, **keywords)


def inputs(sq: int = 60, sk: int = 60) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, size, 8, generator=generator) for size in (sq, sk, sk)]


@pytest.mark.parametrize("mask_mod", [causal, by_head], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(64, 64), (60, 49), (1, 60), (60, 1)], ids=str)
@pytest.mark.parametrize("block_size", [8, (16, 8), 128], ids=str)
def test_status_is_that_of_a_block_mask_of_ours(mask_mod: Any, sizes: tuple[int, int], block_size: Any) -> None:
    theirs = create(mask_mod, *sizes, block_size)
    converted, own = convert(theirs, None)
    assert own is mask_mod
    ours = BlockMask.of(mask_mod, (2, 3, *sizes), tile=theirs.BLOCK_SIZE)
    assert converted.sizes[:4] == ours.sizes[:4]
    # torch counts a last block of fewer queries as partial.
    rows = slice(None) if sizes[0] % theirs.BLOCK_SIZE[0] == 0 else slice(0, -1)
    expected = ours.status.expand(2, 3, -1, -1)
    assert torch.equal(converted.status[:, :, rows], expected[:, :, rows])
    assert torch.equal(converted.status != 0, expected != 0)


def test_without_full_blocks_all_blocks_are_partial() -> None:
    theirs = create(causal, 64, 64)
    partial_only = TorchBlockMask.from_kv_blocks(
        *_merged(theirs), BLOCK_SIZE=theirs.BLOCK_SIZE, mask_mod=causal, seq_lengths=(64, 64)
    )
    assert partial_only.full_kv_num_blocks is None
    status = convert(partial_only, None)[0].status
    assert torch.equal(status, torch.ones(4, 4).tril().to(torch.uint8).expand(2, 3, 4, 4))
    q, k, v = inputs(64, 64)
    out = cute_flash.attn(q, k, v, block_mask=partial_only)
    torch.testing.assert_close(out, cute_flash.attn(q, k, v, causal=True))


def _merged(block_mask: TorchBlockMask) -> tuple[Tensor, Tensor]:
    """The lists of all blocks of a block mask, in descending order."""
    visible = block_mask.to_dense().bool()
    order = torch.argsort(visible.flip(-1).int(), dim=-1, descending=True, stable=True)
    return visible.sum(-1).int(), (visible.shape[-1] - 1 - order).int()


def test_lists_without_a_mask_mod_are_the_mask() -> None:
    """As in torch's compiled kernels. Blocks may be listed in any order, and unused indices have any value."""
    num, indices = torch.tensor([[[2, 0, 1, 2]]]).int(), torch.tensor([[[[2, 0], [9, 9], [3, 9], [1, 0]]]]).int()
    theirs = TorchBlockMask.from_kv_blocks(
        num, indices, num * 0, indices, BLOCK_SIZE=16, seq_lengths=(60, 60), compute_q_blocks=False
    )
    visible = torch.zeros(4, 4, dtype=torch.bool)
    visible[0, [0, 2]] = visible[2, 3] = visible[3, [0, 1]] = True
    dense = visible.repeat_interleave(16, 0).repeat_interleave(16, 1)[:60, :60]
    q, k, v = inputs()
    expected = cute_flash.attn(q, k, v, mask_mod=lambda b, h, i, j: dense[i, j])
    torch.testing.assert_close(cute_flash.attn(q, k, v, block_mask=theirs), expected)
    full = TorchBlockMask.from_kv_blocks(
        num * 0, indices, num, indices, BLOCK_SIZE=16, seq_lengths=(60, 60), compute_q_blocks=False
    )
    torch.testing.assert_close(cute_flash.attn(q, k, v, block_mask=full), expected)
    # The last K/V block has 12 keys.
    assert convert(full, None)[0].status[0, 0].tolist() == [[2, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 1], [2, 2, 0, 0]]


def test_one_block_of_any_size() -> None:
    """torch's mask of a call without a block mask has one block of 2³⁰ queries and keys."""
    theirs = flex_attention._create_empty_block_mask(*inputs(60, 200)[:2])
    theirs.seq_lengths = (60, 200)
    assert theirs.BLOCK_SIZE == (1 << 30, 1 << 30)
    assert convert(theirs, None)[0].sizes[:4] == (128, 256, 60, 200)
    q, k, v = inputs(60, 200)
    torch.testing.assert_close(cute_flash.attn(q, k, v, block_mask=theirs), cute_flash.attn(q, k, v))


def test_conversion_is_cached() -> None:
    torch_block_mask._cache.clear()
    theirs = create(document, 60, 60)
    first = convert(theirs, None)[0]
    assert convert(theirs, None)[0] is first
    assert convert(create(document, 60, 60), None)[0] is not first
    theirs.kv_num_blocks[:] = 0
    assert convert(theirs, None)[0] is not first
    del theirs, first
    assert len(torch_block_mask._cache) == 0


def test_inference_tensors_are_converted() -> None:
    with torch.inference_mode():
        theirs = create(causal, 60, 60)
    q, k, v = inputs()
    torch.testing.assert_close(cute_flash.attn(q, k, v, block_mask=theirs), cute_flash.attn(q, k, v, causal=True))


def test_conversion_does_not_synchronize() -> None:
    """Reading a fake tensor on the host raises an error."""
    theirs = create(causal, 60, 60)
    with FakeTensorMode():
        lists = [
            torch.empty(x.shape, dtype=x.dtype)
            for x in (theirs.kv_num_blocks, theirs.kv_indices, theirs.full_kv_num_blocks, theirs.full_kv_indices)
        ]
        fake = TorchBlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(60, 60), compute_q_blocks=False
        )
        converted, _ = convert(fake, None)
    assert converted.partial_kv.indices.shape == (2, 3, 4, 4)


def test_captured_values_are_read_at_each_call() -> None:
    limit = torch.tensor([20])

    def before(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < limit[0]

    theirs = create(before, 60, 60, 64)
    q, k, v = inputs()
    for size in (20, 33):
        limit[0] = size
        expected = cute_flash.attn(q, k[:, :, :size], v[:, :, :size])
        torch.testing.assert_close(cute_flash.attn(q, k, v, block_mask=theirs), expected)


def test_together_with_other_arguments() -> None:
    theirs = create(document, 60, 60)
    q, k, v = inputs()
    keywords: dict[str, Any] = dict(window=(20, 5), softcap=3.0, alibi=torch.tensor([0.1, 0.2, 0.3]))
    expected = cute_flash.attn(q, k, v, mask_mod=document, **keywords)
    torch.testing.assert_close(cute_flash.attn(q, k, v, block_mask=theirs, **keywords), expected)
    torch.testing.assert_close(cute_flash.attn(q, k, v, block_mask=theirs, mask_mod=document, **keywords), expected)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = cute_flash.attn(q, k, v, layout="bshd", block_mask=theirs, **keywords)
    torch.testing.assert_close(out.transpose(1, 2), expected)
    assert cute_flash.supports(q, k, v, layout="bshd", block_mask=theirs)


def test_a_slice_for_decoding() -> None:
    theirs = create(causal, 64, 64)[:, :, 3]
    theirs.mask_mod = lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + 50, kv_idx)
    theirs.seq_lengths = (1, 64)
    q, k, v = inputs(1, 64)
    expected = cute_flash.attn(q, k[:, :, :51], v[:, :, :51])
    torch.testing.assert_close(cute_flash.attn(q, k, v, block_mask=theirs), expected)


def test_subclasses_are_taken() -> None:
    class Subclass(TorchBlockMask):
        pass

    theirs = create(causal, 60, 60)
    theirs.__class__ = Subclass
    q, k, v = inputs()
    torch.testing.assert_close(cute_flash.attn(q, k, v, block_mask=theirs), cute_flash.attn(q, k, v, causal=True))


def test_errors() -> None:
    q, k, v = inputs()
    theirs = create(causal, 60, 60)
    with pytest.raises(ValueError, match=r"mask_mod differs from the mask_mod of block_mask.*and_masks"):
        cute_flash.attn(q, k, v, block_mask=theirs, mask_mod=document)
    sliced = theirs[:, :, :2]
    sliced.mask_mod = causal
    with pytest.raises(ValueError, match=r"block_mask has 2 rows of blocks, and seq_lengths=.*set seq_lengths"):
        cute_flash.attn(q[:, :, :32], k, v, block_mask=sliced)
    with pytest.raises(ValueError, match="block_mask has 60 queries and 60 keys, and the call has 50 and 60"):
        cute_flash.attn(q[:, :, :50], k, v, block_mask=theirs)
    with pytest.raises(ValueError, match="block_mask has heads=3: expected 1 or 2"):
        cute_flash.attn(q[:, :2], k[:, :2], v[:, :2], block_mask=theirs)


@pytest.mark.processes
def test_import_does_not_load_flex_attention() -> None:
    """torch's module takes long to import; `attn` recognises a block mask by its type's name."""
    code = """
import sys, torch
before = set(sys.modules)
import cute_flash
x = torch.zeros(1, 1, 4, 8)
cute_flash.attn(x, x, x, block_mask=cute_flash.BlockMask.of(None, (1, 1, 4, 4), causal=True))
new = set(sys.modules) - before
assert not [name for name in new if "integrations" in name or "flex_attention" in name], new
cute_flash.flex_attention(x, x, x)
assert "cute_flash.score_mod.torch_block_mask" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
