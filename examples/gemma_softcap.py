"""Attention layers as in Gemma 2: soft-capped scores, grouped K/V heads, a sliding window in every second layer.

`softcap=c` replaces a score s by c tanh(s / c) before the mask. `dense_attention` computes the same in plain torch. The
script compares outputs and gradients. Gemma 2 has a cap of 50; it is 5 here, because random weights give small scores.

    python examples/gemma_softcap.py
"""

import torch
from torch import Tensor, nn

import cute_flash

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Attention(nn.Module):
    """`window`: how many keys a query sees, its own included; None: all keys up to its own."""

    def __init__(self, width: int, heads: int, heads_kv: int, head_dim: int, window: int | None, softcap: float):
        super().__init__()
        self.heads, self.heads_kv, self.window, self.softcap = heads, heads_kv, window, softcap
        self.scale = head_dim**-0.5  # Gemma's query_pre_attn_scalar ** -0.5
        self.q = nn.Linear(width, heads * head_dim, bias=False)
        self.kv = nn.Linear(width, 2 * heads_kv * head_dim, bias=False)
        self.proj = nn.Linear(heads * head_dim, width, bias=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, S, H, D), k and v (B, S, Hkv, D)."""
        k, v = self.kv(x).unflatten(-1, (2, self.heads_kv, -1)).unbind(2)
        return self.q(x).unflatten(-1, (self.heads, -1)), k, v

    def forward(self, x: Tensor) -> Tensor:
        left = None if self.window is None else self.window - 1
        q, k, v = self.split(x)
        out = cute_flash.attn(q, k, v, window=(left, 0), softcap=self.softcap, scale=self.scale, layout="bshd")
        return self.proj(out.flatten(2))


def dense_attention(layer: Attention, x: Tensor) -> Tensor:
    """The same layer with all scores in memory."""
    q, k, v = (t.float().transpose(1, 2) for t in layer.split(x))
    k, v = (t.repeat_interleave(layer.heads // layer.heads_kv, dim=1) for t in (k, v))
    scores = q @ k.mT * layer.scale
    scores = layer.softcap * torch.tanh(scores / layer.softcap)
    i = torch.arange(x.shape[1], device=x.device)
    distance = i[:, None] - i
    visible = (distance >= 0) & (distance < (layer.window or x.shape[1]))
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return layer.proj((probabilities @ v).to(x.dtype).transpose(1, 2).flatten(2))


def main(seqlen: int = 512, window: int = 128, softcap: float = 5.0) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the output and the gradients of the weights of q and kv: of cute_flash, then dense."""
    torch.manual_seed(0)
    width, heads, heads_kv, head_dim = 256, 8, 4, 64
    layers = [Attention(width, heads, heads_kv, head_dim, keys, softcap).to(DEVICE, DTYPE) for keys in (window, None)]
    weights = [weight for layer in layers for weight in (layer.q.weight, layer.kv.weight)]
    x = 3 * torch.randn(1, seqlen, width, device=DEVICE, dtype=DTYPE)
    results = []
    for attend in (Attention.forward, dense_attention):
        out = x
        for layer in layers:
            out = out + attend(layer, out)
        results.append([out, *torch.autograd.grad(out.square().sum(), weights)])
    names = "output", "local q", "local kv", "global q", "global kv"
    for name, ours, dense in zip(names, *results):
        print(f"{name}: largest difference {(ours - dense).abs().max():.1e}, largest value {dense.abs().max():.1e}")
    return results[0], results[1]


if __name__ == "__main__":
    main()
