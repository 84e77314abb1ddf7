"""Small models of transformers with random weights: `cute_attention` against eager attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError, attn
from cute_flash.integrations import transformers as adapter
from cute_flash.integrations.transformers import attention, register
from tests.integrations.small_models import causal_models, common, losses_of_training, transformers

IS_4 = transformers.__version__.startswith("4.")

COMMON = common(vocabulary=99, hidden=64, head_dim=16, positions=128)
CAUSAL = causal_models(COMMON, window=7)
MODELS: dict[str, Callable[[], Any]] = {
    **CAUSAL,
    # A sliding window of 8 would let all but the last token of a chunk see the previous chunk; chunks do not.
    "llama4 chunks": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **COMMON,
            intermediate_size_mlp=96,
            num_local_experts=2,
            attention_chunk_size=8,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
        )
    ),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            vocab_size=99,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            local_attention=6,
            global_attn_every_n_layers=2,
            pad_token_id=0,
            cls_token_id=1,
            sep_token_id=2,
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ),
}
# Models of transformers 4.57 that have their own attention classes in place of `AttentionInterface`.
OWN_CLASSES = ("bert", "modernbert", "t5") if IS_4 else ()
BATCH, LENGTH = 3, 21


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if side == "left":
        mask[1, :5] = mask[2, :12] = 0
    elif side == "right":
        mask[1, -5:] = mask[2, -12:] = 0
    return mask


def logits_and_gradients(model: Any, implementation: str, rows: Tensor, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    """Of a weighted sum of the logits of `rows`, the tokens that are not padding."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(**inputs).logits * rows[..., None]
    (logits * torch.sin(torch.arange(logits.numel()).view_as(logits))).sum().backward()
    return logits.detach(), [x.grad.clone() for x in model.parameters() if x.grad is not None]


def check(model: Any, rows: Tensor, expected_inputs: dict[str, Any] | None = None, **inputs: Any) -> None:
    expected = logits_and_gradients(model, "eager", rows, **(inputs if expected_inputs is None else expected_inputs))
    logits, gradients = logits_and_gradients(model, "cute_attention", rows, **inputs)
    torch.testing.assert_close(logits, expected[0].view_as(logits), atol=1e-5, rtol=1e-5)
    assert len(gradients) == len(expected[1])
    largest = max(float(x.abs().max()) for x in expected[1])
    for x, y in zip(gradients, expected[1]):
        torch.testing.assert_close(x, y, atol=1e-6 * largest, rtol=1e-4)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in OWN_CLASSES])
def test_forward_and_backward(name: str, side: str) -> None:
    inputs = dict(input_ids=tokens(), attention_mask=padding(side))
    is_t5 = name == "t5"
    rows = torch.ones(BATCH, LENGTH) if is_t5 else padding(side).float()
    check(model_of(name), rows, **inputs, **({"decoder_input_ids": tokens()} if is_t5 else {}))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in OWN_CLASSES])
def test_every_layer_calls_attn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(adapter, "attn", lambda *args, **keywords: calls.append(1) or attn(*args, **keywords))
    model = model_of(name)
    model.set_attn_implementation("cute_attention")
    model(input_ids=tokens(), **({"decoder_input_ids": tokens()} if name == "t5" else {}))
    # The decoder of T5 has cross attention too.
    assert len(calls) == (6 if name == "t5" else 2)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_bf16(name: str) -> None:
    """The error beside fp32 eager is at most twice that of bf16 eager."""
    model, inputs, rows = model_of(name), dict(input_ids=tokens(), attention_mask=padding("left")), padding("left")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        exact = model(**inputs).logits[rows.bool()]
        model.bfloat16()
        eager = model(**inputs).logits[rows.bool()]
        model.set_attn_implementation("cute_attention")
        out = model(**inputs).logits[rows.bool()]
    assert (out - exact).abs().max() <= 2 * (eager - exact).abs().max()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [name for name in (*CAUSAL, "t5") if name not in OWN_CLASSES])
def test_generate(name: str, cache: str) -> None:
    model, results = model_of(name), []
    for implementation in ("eager", "cute_attention"):
        model.set_attn_implementation(implementation)
        result = model.generate(
            input_ids=tokens(), attention_mask=padding("left"), max_new_tokens=12, min_new_tokens=12, do_sample=False,
            cache_implementation=cache, pad_token_id=0,
        )  # fmt: skip
        results.append(result)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", [name for name in ("gemma2", "gemma4") if name in CAUSAL])
def test_training(name: str) -> None:
    model = model_of(name)
    expected, losses = (losses_of_training(model, x, tokens()) for x in ("eager", "cute_attention"))
    assert losses == pytest.approx(expected, rel=1e-4) and losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", *(["gemma4"] if "gemma4" in CAUSAL else [])])
@pytest.mark.parametrize(
    "has_offsets, use_cache", [(False, False), (True, False), (True, True)], ids=["positions", "offsets", "cache"]
)
def test_varlen_batches(name: str, has_offsets: bool, use_cache: bool) -> None:
    """Three sequences in one row give the results of eager attention on a padded batch."""
    lengths = [21, 4, 13]
    padded, rows = tokens(), torch.zeros(BATCH, LENGTH)
    for i, length in enumerate(lengths):
        rows[i, :length] = 1
    is_token = rows.bool()
    # transformers looks for packed sequences in position_ids if there is no cache.
    inputs: dict[str, Any] = dict(input_ids=padded[is_token][None], use_cache=use_cache)
    inputs["position_ids"] = torch.cat([torch.arange(x) for x in lengths])[None]
    if has_offsets:
        offsets = torch.tensor([0, 21, 25, 38], dtype=torch.int32)
        inputs.update(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=21, max_length_k=21)
    model = model_of(name)
    model.set_attn_implementation("eager")
    expected = model(input_ids=padded, attention_mask=rows.long()).logits[is_token]
    model.set_attn_implementation("cute_attention")
    torch.testing.assert_close(model(**inputs).logits[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_bool", [True, False], ids=["bool", "additive"])
def test_masks_of_the_user(is_bool: bool) -> None:
    visible = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.5
    visible |= torch.eye(LENGTH, dtype=torch.bool)
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    inputs = dict(input_ids=tokens(), attention_mask=additive)
    mine = dict(input_ids=tokens(), attention_mask=visible if is_bool else additive)
    check(model_of("llama"), torch.ones(BATCH, LENGTH), expected_inputs=inputs, **mine)


def test_unknown_mask_functions_give_the_mask_of_sdpa() -> None:
    from transformers.masking_utils import create_causal_mask

    config = transformers.LlamaConfig(**COMMON)
    masks = []
    for implementation in ("sdpa", "cute_attention"):
        config._attn_implementation = implementation
        x = torch.zeros(BATCH, LENGTH, 64)
        others = (torch.arange(LENGTH), None) if IS_4 else (None,)
        masks.append(create_causal_mask(config, x, None, *others, or_mask_function=lambda b, h, i, j: j < 5))
    assert masks[0].shape == (BATCH, 1, LENGTH, LENGTH) and torch.equal(*masks)


@pytest.mark.skipif(IS_4, reason="transformers 4 ignores is_causal of a model")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_bidirectional_decoders(name: str) -> None:
    """`is_causal=False` of a decoder reaches both the mask and the layers."""
    check(model_of(name), torch.ones(BATCH, LENGTH), input_ids=tokens(), is_causal=False)


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_model(name: str) -> None:
    model, inputs, rows = model_of(name), dict(input_ids=tokens(), attention_mask=padding("left")), padding("left")
    model.set_attn_implementation("cute_attention")
    expected = model(**inputs, use_cache=False).logits[rows.bool()]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs, use_cache=False).logits[rows.bool()], expected)


def test_later_tokens_of_a_cache() -> None:
    """Several queries with a cache: the last query is aligned with the last key."""
    for name in ("llama", "gemma3"):
        model, results = model_of(name), []
        for implementation in ("eager", "cute_attention"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                past = model(input_ids=tokens()[:, :13], use_cache=True).past_key_values
                results.append(model(input_ids=tokens()[:, 13:], past_key_values=past).logits)
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_dropout_in_training() -> None:
    config = transformers.LlamaConfig(**COMMON, attention_dropout=0.5)
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation("cute_attention")
    results = []
    for is_training in (True, True, False, False):
        model.train(is_training)
        results.append(model(input_ids=tokens()).logits)
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])


def test_a_position_bias_and_a_mask_of_numbers_are_added() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    bias, mask = torch.randn(1, 2, 5, 5), torch.zeros(1, 1, 5, 5)
    mask[..., 3:] = -torch.inf
    module = torch.nn.Module()
    found, _ = attention(module, q, k, v, mask, position_bias=bias)
    torch.testing.assert_close(found, attn(q, k, v, bias=bias + mask).transpose(1, 2))
    found, _ = attention(module, q, k, v, None, is_causal=False, position_bias=bias)
    torch.testing.assert_close(found, attn(q, k, v, bias=bias).transpose(1, 2))


def test_refused() -> None:
    for name in ("cute_flash", "sdpa", "paged|cute"):
        with pytest.raises(ValueError, match="transformers reserves it; use a name such as 'cute_attention'"):
            register(name)
    module, x = torch.nn.Module(), torch.zeros(1, 2, 5, 8)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    cases: list[tuple[dict[str, Any], str]] = [
        (dict(output_attentions=True), "output_attentions=True: .*'eager'"),
        (dict(block_table=offsets), "block_table, of continuous batching"),
        (dict(relative_bias=x), "relative_bias is a tensor that cute_flash does not support"),
        (dict(sliding_window=3, is_causal=False), "sliding_window=3 without is_causal"),
        (dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, position_bias=x), "cu_seq_lens_q with an attention_mask"),
    ]
    for keywords, message in cases:
        with pytest.raises(UnsupportedError, match=message):
            attention(module, x, x, x, None, **keywords)


def test_other_names_can_be_registered() -> None:
    assert register("my_attention") == "my_attention"
    model = model_of("llama")
    model.set_attn_implementation("my_attention")
    assert model(input_ids=tokens()).logits.shape == (BATCH, LENGTH, 99)


# ---- mask functions of transformers


utils = transformers.masking_utils
PADDING = torch.tensor([[True] * 9, [False] * 3 + [True] * 6])
PACKED = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 3, 3]])
MASKS: dict[str, Any] = {
    "causal": utils.causal_mask_function,
    "bidirectional": utils.bidirectional_mask_function,
    "sliding": utils.and_masks(utils.sliding_window_overlay(4), utils.causal_mask_function),
    "chunked": utils.and_masks(utils.chunked_overlay(4, torch.tensor([0, 3])), utils.causal_mask_function),
    "padding": utils.and_masks(utils.causal_mask_function, utils.padding_mask_function(PADDING)),
    "packed": utils.and_masks(utils.causal_mask_function, utils.packed_sequence_mask_function(PACKED)),
    "or": utils.or_masks(
        utils.sliding_window_overlay(2), utils.padding_mask_function(PADDING), utils.causal_mask_function
    ),
    "offsets": utils.add_offsets_to_mask_function(
        utils.and_masks(utils.sliding_window_overlay(3), utils.causal_mask_function), 2, 0
    ),
    "offset tensors": utils.add_offsets_to_mask_function(utils.causal_mask_function, torch.tensor(3), torch.tensor(1)),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_functions_are_traced(name: str) -> None:
    """The functions that transformers composes masks from."""
    mask = MASKS[name]
    q, k, v = (torch.randn(2, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    b, h, i = torch.arange(2).view(-1, 1, 1, 1), torch.tensor(0), torch.arange(9)[:, None]
    visible = mask(b, h, i, torch.arange(9)).expand(2, 2, 9, 9)
    expected = torch.softmax((q @ k.mT / 8**0.5).masked_fill(~visible, -torch.inf), -1).nan_to_num(0.0) @ v
    torch.testing.assert_close(attn(q, k, v, mask_mod=mask), expected)
