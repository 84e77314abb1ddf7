"""`bert_padding`: removing and restoring padding, with gradients."""

from __future__ import annotations

import pytest
import torch

from cute_flash.integrations.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input

MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
def test_unpad_and_pad(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, MASK.to(dtype))
    assert torch.equal(tokens, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 2, 9, 10]
    assert cu_seqlens.tolist() == [0, 3, 3, 5] and cu_seqlens.dtype == torch.int32
    assert max_seqlen == 3 and type(max_seqlen) is int
    assert seqused.tolist() == [3, 0, 2] and seqused.dtype == torch.int32
    back = pad_input(tokens, indices, 3, 4)
    assert torch.equal(back, x * MASK[..., None, None])
    weights = torch.randn_like(x)
    (back * weights).sum().backward()
    assert torch.equal(x.grad, weights * MASK[..., None, None])


def test_unused_elements_stay() -> None:
    x = torch.randn(2, 3, 8)
    mask, unused = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[0, 0, 1], [0, 1, 0]])
    tokens, _, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask, unused)
    assert torch.equal(tokens, torch.cat((x[0], x[1, :2])))
    assert (cu_seqlens.tolist(), max_seqlen, seqused.tolist()) == ([0, 3, 5], 3, [2, 1])


def test_no_tokens() -> None:
    tokens, _, cu_seqlens, max_seqlen, _ = unpad_input(torch.randn(2, 3, 8), torch.zeros(2, 3))
    assert (tokens.shape, cu_seqlens.tolist(), max_seqlen) == ((0, 8), [0, 0, 0], 0)
    assert unpad_input(torch.randn(0, 3, 8), torch.zeros(0, 3))[3] == 0


def test_rows() -> None:
    x, indices = torch.randn(4, 3, requires_grad=True), torch.tensor([2, 0, 2])
    index_first_axis(x, indices).sum().backward()
    assert x.grad[:, 0].tolist() == [1, 0, 2, 0]
    values = torch.randn(2, 3)
    found = index_put_first_axis(values, torch.tensor([3, 1]), 4)
    assert torch.equal(found[[3, 1]], values) and (found[[0, 2]] == 0).all()


def test_a_mask_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 3\)"):
        unpad_input(torch.randn(2, 3, 8), torch.ones(3, 3))
