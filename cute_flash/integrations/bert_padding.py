"""`flash_attn.bert_padding`: from padded batches (B, S, …) to the tokens of varlen batches (T, …), and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of a tensor (N, …) at the indices (T). Differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor (first_axis_dim, …) with the values (T, …) at the indices (T), and 0 elsewhere. Differentiable."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Remove the padding of a batch.

    The host reads the longest length, and so synchronizes with the GPU, as in flash-attn.

    Args:
        hidden_states: (B, S, …).
        attention_mask: (B, S), bool or integer: nonzero for tokens, 0 for padding.
        unused_mask: (B, S): nonzero for unused elements that stay in the result.

    Returns:
        (hidden_states, indices, cu_seqlens, max_seqlen, seqused): the remaining elements (T, …), their indices in the
            flattened batch, the offsets (B + 1), int32, the largest length, and the numbers of used tokens (B), int32.

    Example:
        >>> import torch
        >>> from cute_flash.integrations.bert_padding import pad_input, unpad_input
        >>> x, mask = torch.randn(2, 3, 8), torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)
        >>> cu_seqlens.tolist(), max_seqlen, seqused.tolist()
        ([0, 2, 5], 3, [2, 3])
        >>> torch.equal(pad_input(tokens, indices, 2, 3), x * mask[..., None])
        True
    """
    if attention_mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: expected {tuple(hidden_states.shape[:2])}, "
            "the batch and length of hidden_states"
        )
    used = attention_mask.bool()
    remaining = used if unused_mask is None else used | unused_mask.bool()
    seqlens = remaining.sum(-1, dtype=torch.int32)
    indices = remaining.flatten().nonzero().flatten()
    cu_seqlens = pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(seqlens.max()) if seqlens.numel() else 0
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, max_seqlen, used.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens (T, …) back to their indices in a batch (batch, seqlen, …); padding is 0. Differentiable."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
