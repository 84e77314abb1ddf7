"""Greedy generation with a paged K/V cache: one call of `attn_decode` rotates, appends and attends.

The first call takes all prompts, and later calls take one token of each sequence. Dense `attn` gives the same tokens.

    python examples/generate.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import cute_flash

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # of q, k, v and the cache; weights are fp32
VOCABULARY, WIDTH, HEADS, HEADS_KV, HEAD_DIM, LAYERS, PAGE_SIZE, MAX_TOKENS = 64, 128, 8, 2, 32, 2, 16, 64
ANGLES = torch.outer(torch.arange(MAX_TOKENS), 100.0 ** -torch.linspace(0, 1, HEAD_DIM // 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        widths = (WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM), (HEADS * HEAD_DIM, WIDTH), (WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(*sizes) for sizes in widths) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Logits (T, vocabulary); `attend(layer, q, k, v)` takes and returns (T, heads, head dim)."""
        x = 0.1 * self.tokens(tokens)
        for i, (qkv, proj, mlp) in enumerate(self.layers):
            heads = qkv(nn.functional.layer_norm(x, (WIDTH,))).to(DTYPE).unflatten(-1, (-1, HEAD_DIM))
            x = x + proj(attend(i, *heads.split((HEADS, HEADS_KV, HEADS_KV), dim=1)).flatten(1).float())
            x = x + mlp(nn.functional.gelu(x))
        return self.head(nn.functional.layer_norm(x, (WIDTH,)))


def generate(model: Model, prompts: list[Tensor], steps: int) -> Tensor:
    """(B, steps) tokens, with a paged cache."""
    batch, max_pages = len(prompts), MAX_TOKENS // PAGE_SIZE
    pages = torch.empty(LAYERS, 2, batch * max_pages, PAGE_SIZE, HEADS_KV, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    options = {"rotary_cos": ANGLES.cos().to(DEVICE), "rotary_sin": ANGLES.sin().to(DEVICE)}
    options["page_table"] = torch.randperm(batch * max_pages).view(batch, max_pages).to(DEVICE, torch.int32)
    options["cache_seqlens"] = torch.zeros(batch, device=DEVICE, dtype=torch.int32)
    options["cu_seqlens_q"] = torch.tensor([0, *map(len, prompts)], device=DEVICE).cumsum(0, dtype=torch.int32)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cute_flash.attn_decode(q, *pages[layer], k_new=k, v_new=v, **options)

    tokens = [torch.cat(prompts)]
    for _ in range(steps):
        tokens.append(model(tokens[-1], attend)[options["cu_seqlens_q"][1:] - 1].argmax(dim=-1))
        options["cache_seqlens"] += options["cu_seqlens_q"].diff()
        options["cu_seqlens_q"] = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
    return torch.stack(tokens[1:], dim=1)


def dense_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cos, sin = (x[: len(q), None].to(DEVICE) for x in (ANGLES.cos(), ANGLES.sin()))
    halves = [x.float().chunk(2, dim=-1) for x in (q, k)]
    q, k = (torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(DTYPE) for a, b in halves)
    return cute_flash.attn(q[None], k[None], v[None], causal=True, layout="bshd")[0]


@torch.no_grad()
def main(steps: int = 12, seed: int = 44) -> Tensor:
    torch.manual_seed(seed)  # a seed with clear argmaxes: rounding changes no token
    model = Model().to(DEVICE)
    texts = [torch.randint(VOCABULARY, (length,)).to(DEVICE) for length in (5, 23, 1)]
    generated = generate(model, texts, steps)
    for text, tokens in zip(texts, generated):
        print(f"{len(text)} tokens, then {' '.join(map(str, tokens.tolist()))}")
        for _ in range(steps):
            text = torch.cat((text, model(text, dense_attention)[-1:].argmax(dim=-1)))
        assert torch.equal(text[-steps:], tokens), "dense attention generates other tokens"
    return generated


if __name__ == "__main__":
    main()
