"""Train a tiny GPT on a text that counts: "1000 1001 1002 ...", one token for each character.

A character alone does not determine the next one: the model has to attend to the previous number. Attention is one
call, `cute_flash.attn(q, k, v, causal=True, layout="bshd")`, on strided views of one projection.

    python examples/train_gpt.py                # a GPU with autocast to bf16 if there is one, else the CPU in fp32
    python examples/train_gpt.py --steps 500 --compile
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cute_flash

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TEXT = " ".join(str(n) for n in range(1000, 10000))
VOCABULARY = 128  # ASCII


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # each (B, S, H, D)
        x = x + self.proj(cute_flash.attn(q, k, v, causal=True, layout="bshd").flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, seqlen: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(seqlen, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]))


def main(steps: int = 150, batch: int = 16, seqlen: int = 32, width: int = 64, compile: bool = False) -> list[float]:
    torch.manual_seed(0)
    data = torch.tensor(list(TEXT.encode()), device=DEVICE)
    model = GPT(seqlen, width, heads=2, layers=2).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    forward = torch.compile(model) if compile else model
    losses, start = [], time.perf_counter()
    for step in range(1, steps + 1):
        first = torch.randint(len(data) - seqlen, (batch, 1), device=DEVICE)
        sample = data[first + torch.arange(seqlen + 1, device=DEVICE)]
        with torch.autocast(DEVICE, DTYPE, enabled=DTYPE != torch.float32):
            logits = forward(sample[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), sample[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            seconds, start = time.perf_counter() - start, time.perf_counter()
            print(f"step {step}: loss {losses[-1]:.3f}, {50 * batch * seqlen / seconds:,.0f} tokens/s")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny GPT.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    options = parser.parse_args()
    main(options.steps, compile=options.compile)
