"""Multi-head latent attention (MLA), as in DeepSeek's models: prefill with `attn`, decode over one latent cache.

Decoding multiplies queries with the key projection, so the cached row (latent, rotated key) is the key of all heads,
and its first columns are the value. Attention with keys and values of each head gives the same tokens.

    python examples/mla.py
"""

import torch
from torch import Tensor, nn

import cute_flash

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)  # weights: fp32
VOCABULARY, WIDTH, HEADS, LAYERS, MAX_TOKENS = 64, 128, 8, 2, 64
LATENT, PLAIN, TURNED, VALUE = 48, 32, 16, 32  # columns: compressed; of q and k without and with rotation; of values
SCALE = (PLAIN + TURNED) ** -0.5
ANGLES = torch.outer(torch.arange(MAX_TOKENS), 100.0 ** -torch.linspace(0, 1, TURNED // 2))


def rotated(x: Tensor, first: int) -> Tensor:  # (B, T, heads, TURNED); the position of the first token
    turns = torch.polar(torch.ones(()), ANGLES[first : first + x.shape[1], None]).to(DEVICE)
    return torch.view_as_real(torch.complex(*x.chunk(2, dim=-1)) * turns).transpose(-1, -2).flatten(-2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.rows = nn.Linear(WIDTH, HEADS * (PLAIN + TURNED)), nn.Linear(WIDTH, LATENT + TURNED)
        self.keys, self.values = (nn.Parameter(torch.randn(HEADS, LATENT, n) * LATENT**-0.5) for n in (PLAIN, VALUE))
        self.proj = nn.Linear(HEADS * VALUE, WIDTH)

    def forward(self, x: Tensor, cache: Tensor, length: int) -> Tensor:
        """x is (B, T, WIDTH), and follows `length` tokens in the cache (B, S, 1, LATENT + TURNED)."""
        q_plain, q_turned = self.queries(x).unflatten(-1, (HEADS, -1)).split((PLAIN, TURNED), dim=-1)
        latent, k_turned = self.rows(x)[:, :, None].split((LATENT, TURNED), dim=-1)
        q_turned, rows = rotated(q_turned, length), torch.cat((latent, rotated(k_turned, length)), dim=-1).to(DTYPE)
        if length:  # decode
            q = torch.cat((torch.einsum("bthp,hlp->bthl", q_plain, self.keys), q_turned), dim=-1).to(DTYPE)
            out = cute_flash.attn_decode(q, cache, value_dim=LATENT, cache_seqlens=length, k_new=rows, scale=SCALE)
            out = torch.einsum("bthl,hlv->bthv", out.float(), self.values)
        else:  # prefill
            cache[:, : x.shape[1]] = rows
            k_plain, v = (torch.einsum("btol,hlw->bthw", latent, x).to(DTYPE) for x in (self.keys, self.values))
            k = torch.cat((k_plain, rows[..., LATENT:].expand(-1, -1, HEADS, -1)), dim=-1)
            out = cute_flash.attn(torch.cat((q_plain, q_turned), dim=-1).to(DTYPE), k, v, causal=True, layout="bshd")
        return self.proj(out.float().flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, caches: Tensor, length: int) -> Tensor:
        """The next tokens, (B, 1), after tokens (B, T) that follow `length` others."""
        x = self.tokens(tokens)
        for layer, cache in zip(self.layers, caches):
            x = x + layer(nn.functional.layer_norm(x, (WIDTH,)), cache, length)
        return self.head(nn.functional.layer_norm(x[:, -1:], (WIDTH,))).argmax(dim=-1)


@torch.no_grad()
def main(steps: int = 12, seed: int = 48) -> Tensor:
    torch.manual_seed(seed)  # a seed with clear argmaxes: rounding changes no token
    model, text = Model().to(DEVICE), torch.randint(VOCABULARY, (3, 9)).to(DEVICE)
    caches = torch.empty(LAYERS, 3, MAX_TOKENS, 1, LATENT + TURNED, device=DEVICE, dtype=DTYPE)
    tokens = [model(text, caches, 0)]
    for step in range(steps - 1):
        tokens.append(model(tokens[-1], caches, text.shape[1] + step))
    for _ in range(steps):  # the whole text again for each token
        text = torch.cat((text, model(text, torch.empty_like(caches), 0)), dim=1)
    assert torch.equal(torch.cat(tokens, dim=1), text[:, -steps:]), "keys and values of each head give other tokens"
    print(*(" ".join(map(str, line)) for line in text[:, -steps:].tolist()), sep="\n")
    return text[:, -steps:]


if __name__ == "__main__":
    main()
