"""Verify a tree of draft tokens in one pass, as in speculative decoding.

A draft model proposes several continuations as a tree. With `masks.tree`, each drafted token sees the context, its
ancestors and itself, so one pass gives the logits after every branch. The tokens that greedy decoding would have
produced are accepted. The script checks the logits: torch's SDPA computes them for each branch alone.

    python examples/tree_mask.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cute_flash
from cute_flash import masks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 6]  # the node before each drafted token; -1: the context
PATHS: list[list[int]] = []  # the nodes from the root to each node
for node, parent in enumerate(PARENTS):
    PATHS.append([*(PATHS[parent] if parent >= 0 else []), node])


class Model(nn.Module):
    """One attention layer with random weights."""

    def __init__(self, vocabulary: int = 64, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, vocabulary)

    def project(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, each (1, H, S, D)."""
        x = self.tokens(tokens) + self.positions(positions)
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)

    def logits(self, out: Tensor) -> Tensor:
        return self.head(out[0].transpose(0, 1).flatten(1)).float()

    def next_logits(self, tokens: Tensor) -> Tensor:
        """The logits after a sequence of tokens, by torch's SDPA."""
        q, k, v = self.project(tokens, torch.arange(len(tokens), device=tokens.device))
        return self.logits(F.scaled_dot_product_attention(q, k, v, is_causal=True))[-1]


@torch.no_grad()
def main(num_context: int = 200) -> tuple[Tensor, Tensor, list[int]]:
    """Returns the logits after each node, the same computed branch by branch, and the accepted nodes."""
    torch.manual_seed(0)
    model = Model().to(DEVICE, DTYPE)
    context, draft = torch.randint(64, (num_context,)).to(DEVICE), torch.randint(64, (len(PARENTS),)).to(DEVICE)
    for node in (0, 2, 5):  # these draft tokens are correct; the others are random
        draft[node] = model.next_logits(torch.cat((context, draft[PATHS[node][:-1]]))).argmax()

    # Queries of the nodes; keys and values of the context, as from a KV cache, and of the nodes.
    _, k_cache, v_cache = model.project(context, torch.arange(num_context, device=DEVICE))
    depth = torch.tensor([len(path) - 1 for path in PATHS], device=DEVICE)
    q, k, v = model.project(draft, num_context + depth)
    k, v = torch.cat((k_cache, k), dim=2), torch.cat((v_cache, v), dim=2)
    mask = masks.tree(torch.tensor(PARENTS, device=DEVICE), prefix=num_context)
    logits = model.logits(cute_flash.attn(q, k, v, mask_mod=mask))

    # Follow the greedy choices from the root for as long as the draft has them.
    choices, drafted = logits.argmax(dim=-1).tolist(), draft.tolist()
    accepted, node, wanted = [], -1, model.next_logits(context).argmax().item()
    while children := [i for i, parent in enumerate(PARENTS) if parent == node and drafted[i] == wanted]:
        node = children[0]
        wanted = choices[node]
        accepted.append(node)
    expected = torch.stack([model.next_logits(torch.cat((context, draft[path]))) for path in PATHS])
    print(masks.draw(masks.tree(torch.tensor(PARENTS)), len(PARENTS), tile=(4, 4)))
    print(f"accepted nodes {accepted}, next token {wanted}: {len(accepted) + 1} tokens from one pass")
    print(f"largest difference of the logits: {(logits - expected).abs().max():.1e}")
    return logits, expected, accepted


if __name__ == "__main__":
    main()
