"""Attention layers as in GPT-OSS: a sliding window in every second layer, learned sinks, grouped K/V heads.

A sink is a learned logit of each head in the softmax. It has no value, so the weights of the keys sum to less than 1.
`dense_attention` computes the same in plain torch. The script compares outputs and the gradients of the sinks.

    python examples/window_and_sinks.py
"""

import torch
from torch import Tensor, nn

import cute_flash

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Attention(nn.Module):
    """`window`: how many keys a query sees, its own included; None: all keys up to its own."""

    def __init__(self, width: int, heads: int, heads_kv: int, head_dim: int, window: int | None) -> None:
        super().__init__()
        self.heads, self.heads_kv, self.window = heads, heads_kv, window
        self.qkv = nn.Linear(width, (heads + 2 * heads_kv) * head_dim)
        self.proj = nn.Linear(heads * head_dim, width)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """q (B, S, H, D), k and v (B, S, Hkv, D)."""
        heads = self.qkv(x).unflatten(-1, (self.heads + 2 * self.heads_kv, -1))
        return heads.split((self.heads, self.heads_kv, self.heads_kv), dim=2)

    def forward(self, x: Tensor) -> Tensor:
        left = None if self.window is None else self.window - 1
        out = cute_flash.attn(*self.split(x), window=(left, 0), sinks=self.sinks, layout="bshd")
        return self.proj(out.flatten(2))


def dense_attention(layer: Attention, x: Tensor) -> Tensor:
    """The same layer with all scores in memory."""
    q, k, v = (t.float().transpose(1, 2) for t in layer.split(x))
    k, v = (t.repeat_interleave(layer.heads // layer.heads_kv, dim=1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    i = torch.arange(x.shape[1], device=x.device)
    distance = i[:, None] - i
    visible = (distance >= 0) & (distance < (layer.window or x.shape[1]))
    scores = scores.masked_fill(~visible, -torch.inf)
    sinks = layer.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
    probabilities = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    return layer.proj((probabilities @ v).to(x.dtype).transpose(1, 2).flatten(2))


def main(seqlen: int = 512, window: int = 128) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the output and the gradients of the sinks: of cute_flash, then dense."""
    torch.manual_seed(0)
    width, heads, heads_kv, head_dim = 256, 8, 2, 64
    layers = [Attention(width, heads, heads_kv, head_dim, keys).to(DEVICE, DTYPE) for keys in (window, None)]
    sinks = [nn.init.normal_(layer.sinks, mean=3.0) for layer in layers]
    x = torch.randn(1, seqlen, width, device=DEVICE, dtype=DTYPE)
    results = []
    for attend in (Attention.forward, dense_attention):
        out = x
        for layer in layers:
            out = out + attend(layer, out)
        results.append([out, *torch.autograd.grad(out.square().sum(), sinks)])
    for name, ours, dense in zip(("output", "local sinks", "global sinks"), *results):
        print(f"{name}: largest difference {(ours - dense).abs().max():.1e}, largest value {dense.abs().max():.1e}")
    return results[0], results[1]


if __name__ == "__main__":
    main()
