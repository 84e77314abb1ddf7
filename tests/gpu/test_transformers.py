"""Small models of transformers with random weights on a GPU, in bf16: `cute_attention` beside eager attention.

Expected results are those of eager attention in fp32. All models have the same weights, which are rounded to bf16. The
error of `cute_attention` in bf16 must be at most twice that of eager attention in bf16. Most of the time goes into
compiling kernels.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.small_models import causal_models, common, losses_of_training, transformers

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROOT = Path(__file__).parents[2]
BATCH, LENGTH, NEW_TOKENS, WINDOW, VOCABULARY = 3, 150, 12, 33, 199
# A larger spread of weights than the default: else all logits are nearly equal.
COMMON = common(VOCABULARY, hidden=128, head_dim=64, positions=512, initializer_range=0.1)
# All experts are used: rounding changes no choice of experts.
CAUSAL = causal_models(COMMON, WINDOW, softcap=20.0, experts=2)
MODELS: dict[str, Callable[[], Any]] = {
    **CAUSAL,
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192,
            initializer_range=0.1,
        )
    ),
}  # fmt: skip


def models(name: str) -> tuple[Any, Any, Any]:
    """One model three times: eager in fp32, eager in bf16, `cute_attention` in bf16."""
    from cute_flash.integrations.transformers import register

    if name == "bert" and transformers.__version__.startswith("4."):
        pytest.skip("BERT of transformers 4 has its own attention classes")
    torch.manual_seed(0)
    model = MODELS[name]().to(DEVICE, torch.bfloat16).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    exact, ours = copy.deepcopy(model).float(), copy.deepcopy(model)
    for x in (exact, model):
        x.set_attn_implementation("eager")
    ours.set_attn_implementation(register())
    return exact, model, ours


def inputs(side: str) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if side == "left":
        mask[1, :20] = mask[2, :90] = 0
    elif side == "right":
        mask[1, -20:] = mask[2, -90:] = 0
    return dict(input_ids=tokens.to(DEVICE), attention_mask=mask.to(DEVICE))


def logits_and_gradients(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits of the tokens that are not padding, and all gradients in one vector, in fp32."""
    logits = model(**batch).logits.float()[batch["attention_mask"].bool()]
    weights = torch.sin(torch.arange(logits.numel(), device=DEVICE)).view_as(logits)
    (logits * weights).sum().backward()
    gradients = [x.grad.float().flatten() for x in model.parameters() if x.grad is not None]
    return logits.detach(), torch.cat(gradients)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((name, "left") for name in MODELS),
        *((name, x) for name in ("llama", "gemma2", "gemma4", "bert") for x in ("none", "right") if name in MODELS),
    ],
)
def test_forward_and_backward(name: str, side: str) -> None:
    exact, eager, ours = (logits_and_gradients(model, inputs(side)) for model in models(name))
    for what, x, y, expected in zip(("logits", "gradients"), ours, eager, exact):
        error, bound = float((x - expected).norm()), 2 * float((y - expected).norm())
        assert error <= bound, f"{what}: error {error:.3g}, twice that of eager attention {bound:.3g}"
    error, bound = float((ours[0] - exact[0]).abs().max()), 2 * float((eager[0] - exact[0]).abs().max())
    assert error <= bound


@pytest.mark.parametrize("name", [name for name in ("gemma2", "gemma4") if name in CAUSAL])
def test_training(name: str) -> None:
    """Losses in bf16 are as near to those of fp32 as the losses of eager attention, or within 1 %."""
    exact, eager, ours = models(name)
    tokens, ours_name = inputs("none")["input_ids"], ours.config._attn_implementation
    expected, rough = (losses_of_training(model, "eager", tokens) for model in (exact, eager))
    losses = losses_of_training(ours, ours_name, tokens)
    bound = max(2 * abs(x - y) for x, y in zip(rough, expected))
    assert losses == pytest.approx(expected, abs=max(bound, 0.01 * expected[0])) and losses[-1] < losses[0]


def generated(model: Any, cache: str, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """New tokens (B, T) and their logits (B, T, V). `forced`: the tokens to continue with, whatever the logits are."""

    def force(token_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = forced[:, token_ids.shape[1] - LENGTH, None].to(DEVICE)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)

    result = model.generate(
        **inputs("left"), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
        cache_implementation=cache, return_dict_in_generate=True, output_logits=True, disable_compile=True,
        logits_processor=[] if forced is None else [force],
    )  # fmt: skip
    return result.sequences[:, LENGTH:].cpu(), torch.stack(result.logits, 1).float().cpu()


@pytest.mark.parametrize(
    ("name", "cache"), [*((name, "dynamic") for name in CAUSAL), ("llama", "static"), ("gemma3", "static")]
)
def test_generate(name: str, cache: str) -> None:
    """Logits after the tokens of fp32 are within the bound, so tokens differ from fp32 only where two logits tie."""
    exact, eager, ours = models(name)
    tokens, expected = generated(exact, cache)
    logits = generated(ours, cache, tokens)[1]
    error, bound = ((x - expected).abs().max() for x in (logits, generated(eager, cache, tokens)[1]))
    assert error <= 2 * bound
    best = expected.topk(2, -1).values
    is_clear = best[..., 0] - best[..., 1] > 2 * error
    assert is_clear.float().mean() > 0.5 and torch.equal(logits.argmax(-1)[is_clear], tokens[is_clear])


CONTINUOUS_BATCHING = f"""
import cute_flash
cute_flash.install_as_flash_attn(replace=True, metadata=True)
import inspect, sys, torch
import flash_attn
from cute_flash.integrations import flash_attn as adapter
calls = set()
def counted(name):
    function = getattr(adapter, name)
    def call(*args, **keywords):
        calls.add(name)
        return function(*args, **keywords)
    call.__wrapped__ = function
    return call
for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
    setattr(flash_attn, name, counted(name))
from tests.gpu.test_transformers import CAUSAL, VOCABULARY, transformers
torch.manual_seed(0)
model = CAUSAL["llama"]().to("cuda", torch.bfloat16).eval()
prompts = [torch.randint(3, VOCABULARY, (length,)).tolist() for length in (7, 60, 150)]
config = transformers.GenerationConfig(max_new_tokens={NEW_TOKENS}, do_sample=False, eos_token_id=2, pad_token_id=0)
model.set_attn_implementation("eager")
expected = [model.generate(torch.tensor([x]).cuda(), generation_config=config)[0, len(x):].tolist() for x in prompts]
model.set_attn_implementation("flash_attention_2")
assert model.config._attn_implementation == "flash_attention_2"
options = inspect.signature(transformers.ContinuousBatchingConfig).parameters
page_size = "page_size" if "page_size" in options else "block_size"
batching = transformers.ContinuousBatchingConfig(**{{page_size: 256}}, num_blocks=64, max_blocks_per_request=4)
results = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=batching)
equal = [sum(a == b for a, b in zip(x.generated_tokens, y)) for x, y in zip(results.values(), expected)]
print(calls, equal)
assert calls == {{"flash_attn_varlen_func", "flash_attn_with_kvcache"}}
# In bf16, a tie changes a token and all after it.
assert 2 * sum(equal) >= sum(len(x) for x in expected)
"""


@pytest.mark.skipif(
    not hasattr(getattr(transformers, "ContinuousBatchingConfig", None), "max_blocks_per_request"),
    reason="continuous batching of this transformers has no block tables",
)
def test_continuous_batching() -> None:
    subprocess.run([sys.executable, "-c", CONTINUOUS_BATCHING], check=True, cwd=ROOT, timeout=300)
