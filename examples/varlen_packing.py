"""Attention over texts of different lengths, without padding.

`attn_varlen` takes the tokens of all texts in one tensor, (T, H, D), and the offsets of the texts, `cu_seqlens`. A
padded batch computes the same rows, and computes the padding as well. The script compares both, with gradients, and
counts the tokens and the scores that packing saves.

    python examples/varlen_packing.py
"""

import torch
from torch import Tensor, nn

import cute_flash

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TEXTS = [
    "Attention is all you need.",
    "Short.",
    "The quick brown fox jumps over the lazy dog, turns round, and jumps over the lazy dog again. " * 3,
    "Lengths differ, and a padded batch is as long as its longest text.",
]


class Attention(nn.Module):
    """Causal self-attention, on packed tokens (T, width) or on a padded batch (B, S, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        if cu_seqlens is None:
            out = cute_flash.attn(q, k, v, causal=True, layout="bshd")
        else:
            out = cute_flash.attn_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)
        return self.proj(out.flatten(-2))


def main(width: int = 128, heads: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs and the gradient of the qkv weights: packed, then padded."""
    torch.manual_seed(0)
    texts = [torch.tensor(list(text.encode()), device=DEVICE) for text in TEXTS]
    lengths = torch.tensor([len(text) for text in texts], device=DEVICE)
    embedding = nn.Embedding(256, width, device=DEVICE, dtype=DTYPE)
    attention = Attention(width, heads).to(DEVICE, DTYPE)

    cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    packed = attention(embedding(torch.cat(texts)), cu_seqlens)
    (packed_grad,) = torch.autograd.grad(packed.square().sum(), attention.qkv.weight)

    # Causal queries see no later key, so padding on the right changes no row of a text.
    batch = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    is_text = torch.arange(batch.shape[1], device=DEVICE) < lengths[:, None]
    padded = attention(embedding(batch))[is_text]
    (padded_grad,) = torch.autograd.grad(padded.square().sum(), attention.qkv.weight)

    print(f"{len(texts)} texts of {', '.join(map(str, lengths.tolist()))} tokens")
    print(f"tokens: {packed.shape[0]} packed, {batch.numel()} padded")
    scores = int((lengths * (lengths + 1) // 2).sum()), len(texts) * batch.shape[1] * (batch.shape[1] + 1) // 2
    print(f"causal scores of a head: {scores[0]:,} packed, {scores[1]:,} padded, {scores[1] / scores[0]:.1f} x as many")
    results = [packed, packed_grad], [padded, padded_grad]
    for name, a, b in zip(("output", "gradient of the weights"), *results):
        print(f"{name}: largest difference {(a - b).abs().max():.1e}, largest value {b.abs().max():.1e}")
    return results


if __name__ == "__main__":
    main()
