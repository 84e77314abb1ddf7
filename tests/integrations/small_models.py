"""Small causal models of transformers with random weights, for the tests of the adapters, with and without a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="4.57", reason="transformers 4.57 is not installed")


def common(vocabulary: int, hidden: int, head_dim: int, positions: int, **others: Any) -> dict[str, Any]:
    """The configuration of models with grouped heads."""
    return dict(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden // 2, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=positions,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **others,
    )  # fmt: skip


def causal_models(
    sizes: dict[str, Any], window: int, softcap: float = 2.0, experts: int = 1
) -> dict[str, Callable[[], Any]]:
    """Functions that make the models. `sizes`: the result of `common`; `experts`: the number of experts of a token."""
    x, sliding = transformers, dict(sliding_window=window)
    two_kinds = dict(**sliding, layer_types=["sliding_attention", "full_attention"])
    of_gpt2 = ("vocab_size", "bos_token_id", "eos_token_id", "initializer_range")
    gpt2 = {name: sizes[name] for name in of_gpt2 if name in sizes}
    gpt2 |= dict(n_embd=sizes["hidden_size"], n_layer=2, n_head=4, n_positions=sizes["max_position_embeddings"])
    options: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (x.LlamaForCausalLM, x.LlamaConfig, sizes),
        "mistral": (x.MistralForCausalLM, x.MistralConfig, {**sizes, **sliding}),
        "qwen3": (x.Qwen3ForCausalLM, x.Qwen3Config, sizes),
        "gemma2": (x.Gemma2ForCausalLM, x.Gemma2Config, {**sizes, **sliding, "attn_logit_softcapping": softcap}),
        "gemma3": (x.Gemma3ForCausalLM, x.Gemma3TextConfig, {**sizes, **two_kinds}),
        "gpt_oss": (
            x.GptOssForCausalLM,
            x.GptOssConfig,
            {**sizes, **two_kinds, "num_local_experts": 2, "num_experts_per_tok": experts},
        ),
        "gpt2": (x.GPT2LMHeadModel, x.GPT2Config, gpt2),
    }

    if hasattr(x, "Gemma4ForCausalLM"):
        # As in Gemma 4, layers with full attention have heads of 512 columns, fewer K/V heads, and keys that are also
        # the values.
        wide = dict(global_head_dim=512, num_global_key_value_heads=1, attention_k_eq_v=True)
        per_layer = dict(vocab_size_per_layer_input=sizes["vocab_size"], hidden_size_per_layer_input=16)
        options["gemma4"] = (x.Gemma4ForCausalLM, x.Gemma4TextConfig, {**sizes, **two_kinds, **wide, **per_layer})

    def make(model: Any, config: Any, options: dict[str, Any]) -> Any:
        made = model(config(**options))
        if "global_head_dim" in options:
            # The scale of the scores is 1. In a trained model, the norm of the queries makes them small.
            for layer in made.model.layers:
                layer.self_attn.q_norm.weight.data.mul_(layer.self_attn.head_dim**-0.5)
        return made

    return {name: partial(make, *parts) for name, parts in options.items()}


def losses_of_training(model: Any, implementation: str, tokens: Tensor, num_steps: int = 3) -> list[float]:
    """The losses of a few training steps of a copy of the model."""
    model = copy.deepcopy(model).train()
    model.set_attn_implementation(implementation)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(num_steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
