"""T5's relative position bias, as a score_mod with a learned table.

T5 adds a learned number to each score: one for each head and bucket of distances. The bias depends on the distance
alone, so the kernel reads it from a table of 2 S - 1 distances and no S x S bias is stored. The gradient of the table
comes from the backward kernel. The script compares results with a dense layer, then learns the table of another layer.

    python examples/t5_bias.py
"""

import math

import torch
from torch import Tensor, nn

import cute_flash

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """T5's bidirectional buckets: half for each sign; one per distance if it is small, then logarithmically wider."""
    half, near = num_buckets // 2, num_buckets // 4
    size = distance.abs()
    far = near + (torch.log(size.clamp(min=1) / near) / math.log(max_distance / near) * (half - near)).long()
    return torch.where(distance > 0, half, 0) + torch.where(size < near, size, far.clamp(max=half - 1))


class T5Bias(nn.Module):
    def __init__(self, heads: int, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.table = nn.Parameter(torch.randn(num_buckets, heads))

    def of(self, distance: Tensor) -> Tensor:
        """The biases of some distances (key - query) for all heads, (..., H)."""
        return self.table[bucket(distance, self.num_buckets, self.max_distance)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        last = k.shape[2] - 1  # the row of distance 0
        by_distance = self.of(torch.arange(-last, last + 1, device=q.device))  # (2 S - 1, H)

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + by_distance[kv_idx - q_idx + last, h]

        return cute_flash.attn(q, k, v, score_mod=score_mod, scale=1.0)  # T5 does not scale its scores

    def dense_attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same with all scores in memory."""
        i = torch.arange(q.shape[2], device=q.device)
        bias = self.of(i - i[:, None]).permute(2, 0, 1)
        return ((q.float() @ k.float().mT + bias).softmax(dim=-1) @ v.float()).to(q.dtype)


def main(seqlen: int = 256, heads: int = 4, steps: int = 30) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Returns output and gradient of the table by cute_flash, the same by the dense layer, and the losses."""
    torch.manual_seed(0)
    layer, teacher = T5Bias(heads).to(DEVICE), T5Bias(heads).to(DEVICE)
    q, k, v = (torch.randn(2, heads, seqlen, 32, device=DEVICE, dtype=DTYPE) / 2 for _ in range(3))
    results = []
    for attend in (layer.attend, layer.dense_attend):
        out = attend(q, k, v)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), layer.table)])
    for name, ours, dense in zip(("output", "gradient of the table"), *results):
        print(f"{name}: largest difference {(ours - dense).abs().max():.1e}, largest value {dense.abs().max():.1e}")

    target, losses = teacher.dense_attend(q, k, v).detach().float(), []
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(steps):
        loss = (layer.attend(q, k, v).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss against the teacher: {losses[0]:.1e} at first, {losses[-1]:.1e} after {steps} steps")
    return results[0], results[1], losses


if __name__ == "__main__":
    main()
