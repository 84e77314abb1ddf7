"""Train a tiny GPT whose sequences are sharded over four processes, and compare its losses with those of one process.

Each rank holds a zigzag shard of every sequence. In the model, only `cute_flash.distributed.attn` communicates. The
gradients of weights are summed over ranks. The processes use gloo on the CPU.

    python examples/context_parallel.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import cute_flash
import cute_flash.distributed as cp

VOCABULARY, SEQLEN, WIDTH, HEADS = 64, 61, 32, 4  # 8 chunks do not divide the length: `shard` pads it


class GPT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQLEN, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for qkv, mlp in zip(self.qkv, self.mlp):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
            ranks = {"group": group, "method": "ring", "seqlen": SEQLEN} if group else {}
            x = x + (cp.attn if group else cute_flash.attn)(q, k, v, causal=True, layout="bshd", **ranks).flatten(2)
            x = x + mlp(x)
        return self.head(x)


def train(group: dist.ProcessGroup | None, steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = GPT(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        data = (torch.randint(8, (2, 1)) + torch.arange(SEQLEN + 1)) % VOCABULARY  # the same on every rank
        tokens, labels, positions = data[:, :-1], data[:, 1:], torch.arange(SEQLEN)
        if group:
            tokens, labels = cp.shard(tokens, group=group), cp.shard(labels, group=group, pad_value=-100)
            positions = cp.position_ids(SEQLEN, group=group)
        logits = model(tokens, positions, group).flatten(0, 1)
        # The sum over ranks is the mean over tokens. The loss ignores labels of -100.
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / (2 * SEQLEN)
        optimizer.zero_grad()
        loss.backward()
        for x in (loss.detach(), *(weight.grad for weight in model.parameters())) if group else ():
            dist.all_reduce(x, group=group)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_rank(rank: int, ranks: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save(train(dist.group.WORLD, steps), f"{folder}/losses{rank}")
    dist.destroy_process_group()


def main(ranks: int = 4, steps: int = 50) -> tuple[list[float], list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (ranks, steps, folder), nprocs=ranks)
        sharded, single = torch.load(f"{folder}/losses0"), train(None, steps)
    for i in range(9, steps, 20):
        print(f"step {i + 1}: loss {sharded[i]:.4f} on {ranks} ranks, {single[i]:.4f} on one process")
    return sharded, single


if __name__ == "__main__":
    main()
