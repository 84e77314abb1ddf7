"""Ring attention on one device: each rank has a shard of the sequence, and attends to the K/V shards of all ranks.

Forward: a rank attends to one K/V shard at a time. `merge` combines the partial outputs by their LSEs. Backward:
`attention_bwd` takes the merged output and LSE, and returns the contribution of one K/V shard to dq, dk and dv.
Here a loop runs the ranks one after the other. `cute_flash.distributed.attn` does this on several GPUs.

    python examples/ring_merge.py
"""

import torch
from torch import Tensor

import cute_flash

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
Shard = tuple[Tensor, ...]  # q, k and v of a rank


def ring_forward(shards: list[Shard]) -> list[tuple[Tensor, Tensor]]:
    """The output and the LSE of each rank; causal: shards of later ranks are masked."""
    results = []
    for rank, (q, k, v) in enumerate(shards):
        out, lse = cute_flash.attn(q, k, v, causal=True, return_lse=True, out_dtype=torch.float32)
        for _, k, v in reversed(shards[:rank]):
            partial = cute_flash.attn(q, k, v, return_lse=True, out_dtype=torch.float32)
            out, lse = cute_flash.merge((out, partial[0]), (lse, partial[1]))
        results.append((out.to(q.dtype), lse))
    return results


def ring_backward(shards: list[Shard], results: list[tuple[Tensor, Tensor]], douts: tuple[Tensor, ...]) -> list[Shard]:
    """The gradients of each rank, summed in fp32; dk and dv get contributions of the rank and all later ranks."""
    gradients = [tuple(torch.zeros_like(x, dtype=torch.float32) for x in shard) for shard in shards]
    for rank, ((q, _, _), (out, lse), dout) in enumerate(zip(shards, results, douts)):
        for source in range(rank, -1, -1):
            _, k, v = shards[source]
            dq, dk, dv, _ = torch.ops.cute_flash.attention_bwd(
                dout, None, q, k, v, out, lse, q.shape[-1] ** -0.5, window_right=0 if source == rank else None
            )
            gradients[rank][0].add_(dq)
            gradients[source][1].add_(dk)
            gradients[source][2].add_(dv)
    return gradients


def main(ranks: int = 4, seqlen: int = 512, heads: int = 4, head_dim: int = 64) -> tuple[list[Tensor], list[Tensor]]:
    """Returns out, dq, dk and dv: of the ring, then of one call over the whole sequence."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, seqlen, head_dim, device=DEVICE, dtype=DTYPE) for _ in range(4))
    shards = list(zip(*(x.chunk(ranks, dim=2) for x in (q, k, v))))
    results = ring_forward(shards)
    gradients = ring_backward(shards, results, dout.chunk(ranks, dim=2))
    outs = [out for out, _ in results]
    ring = [torch.cat(list(parts), dim=2).to(DTYPE) for parts in (outs, *zip(*gradients))]

    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cute_flash.attn(*leaves, causal=True)
    whole = [out, *torch.autograd.grad(out, leaves, dout)]
    print(f"{ranks} ranks, {seqlen // ranks} tokens each, {ranks * (ranks + 1) // 2} partial results")
    for name, a, b in zip(("out", "dq", "dk", "dv"), ring, whole):
        print(f"{name}: largest difference {(a - b).abs().max():.1e}, largest value {b.abs().max():.1e}")
    return ring, whole


if __name__ == "__main__":
    main()
