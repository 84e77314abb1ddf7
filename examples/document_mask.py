"""Packed pre-training: documents of different lengths share a sequence, and no query sees another document.

A `BlockMask` of `masks.document`, with `causal=True`, says which 128 x 128 blocks of scores are empty, partial or full.
Kernels skip empty blocks and apply the mask in partial blocks only. All layers use the same block mask. The script
compares outputs and gradients with one call for each document.

    python examples/document_mask.py
"""

import torch
from torch import Tensor, nn

import cute_flash
from cute_flash import BlockMask, masks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
Lengths = tuple[tuple[int, ...], ...]  # of the documents in each sequence of a batch


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, block_mask: BlockMask | None = None) -> Tensor:
        """Causal attention: within the documents of the block mask, or within the whole sequence."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out = cute_flash.attn(q, k, v, causal=block_mask is None, block_mask=block_mask, layout="bshd")
        return self.proj(out.flatten(2))


def main(lengths: Lengths = ((300, 80, 500, 144), (64, 640, 128, 192))) -> tuple[list[Tensor], list[Tensor], BlockMask]:
    """Returns output and gradient of the input: packed, then document by document; and the block mask."""
    torch.manual_seed(0)
    width, heads = 128, 4
    layers = nn.ModuleList(Attention(width, heads) for _ in range(2)).to(DEVICE, DTYPE)
    # (B, S): the number of the document that each token belongs to.
    ids = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths]).to(DEVICE)
    batch, seqlen = ids.shape
    x = torch.randn(batch, seqlen, width, device=DEVICE, dtype=DTYPE, requires_grad=True)

    block_mask = BlockMask.of(masks.document(ids), (batch, heads, seqlen, seqlen), causal=True)
    packed = x
    for layer in layers:
        packed = packed + layer(packed, block_mask)

    documents = []
    for sequence, row in zip(x, lengths):
        for document in sequence.split(row):
            out = document[None]
            for layer in layers:
                out = out + layer(out)
            documents.append(out[0])
    alone = torch.cat(documents).view_as(x)

    causal = BlockMask.of(None, (batch, heads, seqlen, seqlen), causal=True)
    print(f"{batch} sequences of {seqlen} tokens, documents of {lengths}")
    print(f"blocks that are not empty: {block_mask.density:.0%}; of a causal mask: {causal.density:.0%}")
    results = [[out, *torch.autograd.grad(out.square().sum(), x)] for out in (packed, alone)]
    for name, a, b in zip(("output", "gradient"), *results):
        print(f"{name}: largest difference {(a - b).abs().max():.1e}, largest value {b.abs().max():.1e}")
    return results[0], results[1], block_mask


if __name__ == "__main__":
    main()
