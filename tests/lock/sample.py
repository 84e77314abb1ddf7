"""The kernels that `make test` compiles and compares with the lock.

`tests/kernels/test_resources.py` checks their registers, spills and instructions, and `tests/kernels/test_launches.py`
launches some of them.
"""

from __future__ import annotations

# Compiled by every `make test`: both families and directions, fp32, decode, and the features with code of their own.
QUICK = (
    "fwd/sm90/sm_90/d64/bf16/window/softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm90/sm_90/d64/bf16/full/bias-bf16-bhqk-aligned/main",
    "fwd/sm80/sm_80/d128/bf16/causal/score_mod-relative/main",
    "bwd/sm90/sm_90/d256/bf16/full/plain/main",
    "bwd/sm90/sm_90/d128/bf16/causal/score_mod-relative+table_gradients/main",
    "bwd/sm80/sm_80/d64/bf16/window/softcap+alibi+dropout/main",
    "bwd/sm80/sm_80/d64/fp32/causal/plain/main",
    "decode/sm80/sm_80/d128/bf16/causal/page16+append+rotary_halves",
)
# Compiled where the sources of the kernel changed (`tests.lock.sources`): every kernel of the registry, every feature.
SAMPLE = (
    "fwd/sm90/sm_90/d128/bf16/causal/plain/main",
    "fwd/sm90/sm_90/d64/bf16/window/plain/main",
    "fwd/sm90/sm_90/d256/bf16/full/plain/main",
    "fwd/sm90/sm_90/d128/bf16/causal/pack_gqa+q4/main",
    "fwd/sm90/sm_90/d128/bf16/causal/varlen/main",
    "fwd/sm90/sm_90/d128/bf16/causal/varlen/scheduler",
    "fwd/sm90/sm_90/d64/bf16/window/softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm90/sm_90/d128/bf16/full/mask_mod-document_causal+block_map/main",
    "fwd/sm90/sm_90/d64/bf16/full/bias-bf16-bhqk-aligned/main",
    "fwd/sm80/sm_80/d128/bf16/full/plain/main",
    "fwd/sm80/sm_86/d192/bf16/causal/plain/main",
    "fwd/sm80/sm_90/d128/bf16/window/plain/main",
    "fwd/sm80/sm_80/d128/bf16/causal/score_mod-relative/main",
    "bwd/sm90/sm_90/d128/bf16/window/plain/main",
    "bwd/sm90/sm_90/d256/bf16/full/plain/main",
    "bwd/sm90/sm_90/d128/bf16/window/deterministic/main",
    "bwd/sm90/sm_90/d64/bf16/window/softcap+alibi+dropout/main",
    "bwd/sm90/sm_90/d128/bf16/causal/score_mod-relative+table_gradients/main",
    "bwd/sm90/sm_90/d64/bf16/full/bias-bf16-bhqk-aligned/main",
    "bwd/sm90/sm_90/d128/bf16/causal/varlen+dlse/preprocess",
    "bwd/sm90/sm_90/d128/bf16/causal/varlen/postprocess",
    "bwd/sm80/sm_80/d64/bf16/causal/plain/main",
    "bwd/sm80/sm_80/d64/bf16/window/softcap+alibi+dropout/main",
    "bwd/sm80/sm_80/d128/bf16/causal/bias-bf16-hqk-pairs/main",
    "bwd/sm80/sm_86/d72v256/bf16/window/plain/main",
    "fwd/sm80/sm_80/d64/fp32/full/plain/split",
    "fwd/sm80/sm_80/d128/fp32/causal/plain/main",
    "bwd/sm80/sm_80/d128/fp32/full/varlen/split",
    "bwd/sm80/sm_80/d64/fp32/full/dlse/preprocess",
    "bwd/sm80/sm_80/d64/fp32/causal/plain/main",
    "decode/sm90/sm_90/d128/bf16/causal/page16",
    "decode/sm80/sm_80/d128/bf16/causal/page16+append+rotary_halves",
)
