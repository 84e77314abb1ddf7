"""Packed pre-training: documents of different lengths share a sequence, and no query sees another document.

The mask is `masks.document` and `masks.causal` together. A `BlockMask` lists the 128 x 128 blocks of scores that are
empty, partial or full: kernels skip empty blocks and apply the mask in partial ones. It is made once for each batch,
and all layers use it. The script compares it with one call for each document, and with gradients.

    python examples/document_mask.py
"""

import torch
from torch import Tensor, nn

import cute_flash
from cute_flash import BlockMask, masks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LENGTHS = ((300, 80, 500, 144), (64, 640, 128, 192))  # of the documents in each sequence of the batch


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


def main(width: int = 128, heads: int = 4) -> tuple[list[Tensor], list[Tensor], BlockMask]:
    """Returns output and gradient of the input: packed, then document by document; and the block mask."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Attention(width, heads) for _ in range(2)).to(DEVICE, DTYPE)
    # (B, S): the number of the document that each token belongs to.
    ids = torch.stack([torch.repeat_interleave(torch.tensor(lengths)) for lengths in LENGTHS]).to(DEVICE)
    batch, seqlen = ids.shape
    x = torch.randn(batch, seqlen, width, device=DEVICE, dtype=DTYPE, requires_grad=True)

    mask = masks.and_(masks.document(ids), masks.causal())
    block_mask = BlockMask.of(mask, (batch, heads, seqlen, seqlen))
    packed = x
    for layer in layers:
        packed = packed + layer(packed, block_mask)

    documents = []
    for sequence, lengths in zip(x, LENGTHS):
        for document in sequence.split(lengths):
            out = document[None]
            for layer in layers:
                out = out + layer(out)
            documents.append(out[0])
    alone = torch.cat(documents).view_as(x)

    causal = BlockMask.of(masks.causal(), (batch, heads, seqlen, seqlen))
    print(f"{batch} sequences of {seqlen} tokens, documents of {LENGTHS}")
    print(f"blocks that are not empty: {block_mask.density:.0%}; of a causal mask: {causal.density:.0%}")
    results = [[out, *torch.autograd.grad(out.square().sum(), x)] for out in (packed, alone)]
    for name, ours, expected in zip(("output", "gradient"), *results):
        print(
            f"{name}: largest difference {(ours - expected).abs().max():.1e}, largest value {expected.abs().max():.1e}"
        )
    return results[0], results[1], block_mask


if __name__ == "__main__":
    main()
