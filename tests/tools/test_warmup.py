"""`cute_flash.warmup`: its kernels are those of the real calls, it leaves nothing behind, and calls compile nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_flash
from cute_flash import NotCompiledError, UnsupportedError
from cute_flash.jit import kernels
from cute_flash.jit.kernels import compiled_kernel
from cute_flash.planning.launch import CompileKey, LaunchChain, LaunchKey
from cute_flash.planning.plan import plan_forward
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import Problem
from cute_flash.tools import warmup as module
from cute_flash.tools.warmup import WarmUp, recorded_keys
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.recording import RecordingGpu

BF16 = dict(dtype=torch.bfloat16)


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def qkv(heads: int = 4, heads_kv: int = 4, seqlen_q: int = 512, seqlen_k: int = 512, width: int = 64) -> list[Tensor]:
    return [leaf(2, h, s, width) for h, s in ((heads, seqlen_q), (heads_kv, seqlen_k), (heads_kv, seqlen_k))]


def offsets(*ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32)


def attn(*tensors: Tensor, **keywords: Any) -> Callable[[], None]:
    """A step: a call of `attn`, and its gradients."""
    return lambda: cute_flash.attn(*(tensors or qkv()), **keywords).sum().backward()  # type: ignore[union-attr]


def with_lse_gradient() -> None:
    out, lse = cute_flash.attn(*qkv(), return_lse=True)
    (out.sum() + lse.sum()).backward()


def forward_only() -> None:
    with torch.no_grad():
        cute_flash.attn(*qkv(seqlen_q=1, seqlen_k=4096, heads=8, heads_kv=2))


def varlen(**keywords: Any) -> Callable[[], None]:
    def step() -> None:
        tokens = [leaf(700, 4, 64) for _ in range(3)]
        cute_flash.attn_varlen(*tokens, offsets(100, 700), offsets(100, 700), **keywords).sum().backward()  # type: ignore[call-overload]

    return step


@torch.no_grad()
def decode() -> None:
    q, cache, new = (
        torch.zeros(3, 1, 8, 64, **BF16),
        torch.zeros(3, 256, 2, 64, **BF16),
        torch.zeros(3, 1, 2, 64, **BF16),
    )
    cute_flash.attn_decode(q, cache, cache.clone(), cache_seqlens=offsets(1, 2), k_new=new, v_new=new)


@torch.no_grad()
def paged_decode() -> None:
    q, pages = torch.zeros(9, 8, 64, **BF16), torch.zeros(5, 16, 2, 64, **BF16)
    table = torch.zeros(2, 3, dtype=torch.int32)
    lengths = torch.ones(2, dtype=torch.int32)
    cute_flash.attn_decode(q, pages, pages, cache_seqlens=lengths, page_table=table, cu_seqlens_q=offsets(1, 9))


def latent_decode(heads: int = 16, page_size: int | None = None, stored: torch.dtype = torch.bfloat16) -> None:
    """A step with one latent cache (MLA), and an append."""
    q, new = torch.zeros(3, 1, heads, 576, **BF16), torch.zeros(3, 1, 1, 576, **BF16)
    rows = (3, 256) if page_size is None else (3 * 256 // page_size, page_size)
    options: dict[str, Any] = dict(cache_seqlens=torch.ones(3, dtype=torch.int32), value_dim=512, scale=192**-0.5)
    if page_size is not None:
        options["page_table"] = torch.zeros(3, 256 // page_size, dtype=torch.int32)
    with torch.no_grad():
        cute_flash.attn_decode(q, torch.zeros(*rows, 1, 576, dtype=stored), k_new=new, **options)


@torch.no_grad()
def decode_with_lists() -> None:
    q, pages = torch.zeros(3, 2, 64, 576, **BF16), torch.zeros(500, 1, 1, 576, **BF16)
    tables = torch.zeros(3, 2, 100, dtype=torch.int32)
    cute_flash.attn_decode(q, pages, cache_seqlens=100, page_table=tables, value_dim=512, scale=192**-0.5)


@torch.no_grad()
def append_without_queries() -> None:
    q, cache, new = (
        torch.zeros(3, 0, 8, 64, **BF16),
        torch.zeros(3, 256, 2, 64, **BF16),
        torch.zeros(3, 5, 2, 64, **BF16),
    )
    cute_flash.attn_decode(q, cache, cache.clone(), cache_seqlens=7, k_new=new, v_new=new)


def empty() -> None:
    cute_flash.attn(*qkv(seqlen_q=0))


TABLE = leaf(4, dtype=torch.float32)
BLOCK_MASK = cute_flash.BlockMask.of(cute_flash.masks.causal(), (1, 1, 512, 512))

STEPS: dict[str, Callable[[], Any]] = {
    "plain": attn(),
    "causal": attn(causal=True),
    "window": attn(window=(127, 0), layout="bhsd"),
    "bshd": attn(layout="bshd"),
    "chunk": attn(causal=True, attention_chunk=128),
    "long": lambda: attn(*qkv(2, 1, 4096, 4096, 128), causal=True)(),
    "wide": lambda: attn(*qkv(width=256))(),
    "values are narrower": lambda: attn(leaf(2, 4, 512, 128), leaf(2, 4, 512, 128), leaf(2, 4, 512, 64))(),
    "gqa": lambda: attn(*qkv(8, 2, 512))(),
    "few queries": lambda: attn(*qkv(8, 2, 4, 4096))(),
    "no gradient": forward_only,
    "no queries": empty,
    "misaligned": lambda: attn(*(leaf(2, 4, 512, 65)[..., 1:] for _ in range(3)))(),
    "fp32": lambda: attn(*(leaf(2, 4, 512, 64, dtype=torch.float32) for _ in range(3)))(),
    "deterministic": attn(deterministic=True),
    "batch_invariant": attn(batch_invariant=True),
    "out_dtype": attn(out_dtype=torch.float32),
    "gradient of lse": with_lse_gradient,
    "softcap": attn(softcap=30.0),
    "dropout": attn(dropout=0.1),
    "alibi": lambda: attn(alibi=leaf(4, dtype=torch.float32))(),
    "sinks": lambda: attn(sinks=leaf(4))(),
    "bias": lambda: attn(bias=leaf(1, 4, 512, 512))(),
    "bias without gradient": lambda: attn(bias=torch.zeros(512, 512))(),
    "score_mod": attn(score_mod=lambda score, b, h, i, j: score * 2.0),
    "captured tensor": attn(score_mod=lambda score, b, h, i, j: score * TABLE[h]),
    "mask_mod": attn(mask_mod=cute_flash.masks.causal()),
    "block_mask": attn(block_mask=BLOCK_MASK),
    "varlen": varlen(causal=True),
    "varlen with sinks": lambda: varlen(sinks=leaf(4))(),
    "decode": decode,
    "paged decode": paged_decode,
    "append": append_without_queries,
    "latent": latent_decode,
    "latent, many heads": lambda: latent_decode(128, 64),
    "latent, fp8, rows as pages": lambda: latent_decode(16, 1, torch.float8_e4m3fn),
    "latent, lists": decode_with_lists,
}


def launched(step: Callable[[], Any], arch: str) -> list[LaunchKey]:
    """The compiled functions that a step on real tensors binds."""
    gpu = RecordingGpu(ARCHS[arch])
    with use_gpu(gpu), claiming_cuda(), launching_operators():
        step()
    return list(dict.fromkeys(gpu.host_calls))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", STEPS)
def test_kernels_are_those_of_the_call(name: str, arch: str) -> None:
    try:
        expected = launched(STEPS[name], arch)
    except UnsupportedError as error:
        with pytest.raises(UnsupportedError, match="^" + str(error)[:20]):
            recorded_keys(STEPS[name], ARCHS[arch])
        return
    assert recorded_keys(STEPS[name], ARCHS[arch]) == expected
    assert bool(expected) == (name != "no queries")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_of_latent_caches(arch: str) -> None:
    """A generation: the kernels of few and of many query rows, of FP8, and of lists."""

    def step() -> None:
        for name in STEPS:
            if name.startswith("latent"):
                STEPS[name]()

    many = "decode_latent_sm90" if arch == "sm_90" else "decode_latent"
    keys = [(key.kernel, *key.static.tags) for key in recorded_keys(step, ARCHS[arch])]  # type: ignore[union-attr]
    assert keys == [
        ("decode_latent", "appends"),
        (many, "page_chunk", "appends"),
        ("decode_latent", "fp8", "page_row", "appends"),
        (many, "page_row", "has_query_tables"),
    ]


@pytest.mark.parametrize(
    "keywords",
    [
        dict(causal=True),
        dict(k_shape=(2, 2, 512, 64), v_shape=(2, 2, 512, 32), window=(100, None)),
        dict(dropout=0.1, softcap=5.0, deterministic=True),
        dict(score_mod=lambda score, b, h, i, j: score * TABLE[h]),
        dict(bias=torch.zeros(1, 4, 512, 512, requires_grad=True)),
    ],
)
def test_calls_by_shapes(keywords: dict[str, Any]) -> None:
    """A call by shapes is the same as a step."""
    options = {name: x for name, x in keywords.items() if not name.endswith("_shape")}
    shapes = (2, 4, 512, 64), keywords.get("k_shape", (2, 4, 512, 64)), keywords.get("v_shape", (2, 4, 512, 64))
    expected = launched(lambda: attn(*(leaf(*shape) for shape in shapes), **options)(), "sm_90")
    call = dict(q_shape=(2, 4, 512, 64), dtype=torch.bfloat16, **keywords)
    assert recorded_keys(None, ARCHS["sm_90"], backward=True, **call) == expected
    assert recorded_keys([call, call], ARCHS["sm_90"]) == recorded_keys(call, ARCHS["sm_90"]) == expected[:1]
    if isinstance(bias := keywords.get("bias"), Tensor):
        bias.grad = None  # of the real call


def test_gradients_without_and_with_a_gradient_of_the_lse() -> None:
    call = dict(q_shape=(2, 4, 512, 64), dtype=torch.bfloat16, backward=True)
    chains = [
        key for key in recorded_keys(None, ARCHS["sm_90"], return_lse=True, **call) if isinstance(key, LaunchChain)
    ]
    assert [key.keys[0].static.has_dlse for key in chains] == [False, True]


# ---- nothing is left behind


def test_a_step_keeps_parameters_and_gradients() -> None:
    """The real parameters of a model have no fake gradients afterwards, and gradients that they had are unchanged."""
    first, second = (torch.nn.Linear(64, n).bfloat16() for n in (64, 192))
    second.weight.grad = torch.ones_like(second.weight)

    def step() -> Tensor:
        q, k, v = second(first(torch.zeros(2, 128, 64, **BF16))).unflatten(-1, (3, 1, 64)).unbind(2)
        loss = cute_flash.attn(q, k, v, layout="bshd").sum()
        loss.backward()
        return loss

    with use_gpu(RecordingGpu(ARCHS["sm_90"])) as gpu:
        assert len(recorded_keys(step, ARCHS["sm_90"])) == 2
    assert gpu.host_calls == [], "the launcher bound the call"  # type: ignore[attr-defined]
    assert first.weight.grad is None is second.bias.grad
    assert torch.equal(second.weight.grad, torch.ones_like(second.weight))
    assert type(step()) is Tensor


def test_a_block_mask_of_torch_is_not_cached_with_fake_lists() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    block_mask = flex.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 256, 256, device="cpu")
    recorded_keys(None, ARCHS["sm_90"], q_shape=(1, 2, 256, 64), dtype=torch.float16, block_mask=block_mask)
    q = torch.randn(1, 2, 256, 64)
    torch.testing.assert_close(cute_flash.attn(q, q, q, block_mask=block_mask), cute_flash.attn(q, q, q, causal=True))


def test_calls_of_other_fake_modes_are_not_recorded() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def step() -> None:
        with FakeTensorMode():
            cute_flash.attn(*qkv())

    assert recorded_keys(step, ARCHS["sm_90"]) == []


@pytest.mark.compiles
def test_functions_of_torch_compile_run_eagerly() -> None:
    compiled = torch.compile(attn(causal=True), backend="aot_eager")
    assert recorded_keys(compiled, ARCHS["sm_90"]) == recorded_keys(attn(causal=True), ARCHS["sm_90"])


def test_a_model_of_transformers() -> None:
    import cute_flash.integrations.transformers as adapter
    from tests.integrations.small_models import causal_models, common

    adapter.register()
    model = causal_models(common(100, 64, 16, 64), window=8)["llama"]().bfloat16()
    model.set_attn_implementation("cute_attention")
    tokens = torch.ones(2, 32, dtype=torch.int64)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    keys = recorded_keys(step, ARCHS["sm_90"])
    assert {key.kernel.partition("_then")[0] for key in keys} == {"fwd_sm90", "bwd_preprocess"}
    assert all(x.grad is None for x in model.parameters())
    assert launched(step, "sm_90") == keys


def test_sdpa_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of torch that `cute_flash.integrations.sdpa` overrides are seen, while it is active."""
    sdpa = pytest.importorskip("cute_flash.integrations.sdpa")
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("torch 2.10 is needed")

    def step() -> None:
        torch.ops.aten._scaled_dot_product_flash_attention(*qkv(), 0.0, True)[0].sum().backward()

    with sdpa.sdpa():
        keys = recorded_keys(step, ARCHS["sm_90"])
    assert keys == recorded_keys(attn(causal=True), ARCHS["sm_90"])
    assert recorded_keys(step, ARCHS["sm_90"]) == []


# ---- errors


def test_wrong_arguments() -> None:
    call = dict(q_shape=(1, 1, 64, 64), dtype=torch.float16)
    for bad in (lambda: cute_flash.warmup(), lambda: cute_flash.warmup([call], dtype=torch.float16)):
        with pytest.raises(ValueError, match="takes a step, a list of calls, or the keywords of one call"):
            bad()
    with pytest.raises(ValueError, match="a call without dtype"):
        cute_flash.warmup(q_shape=(1, 1, 64, 64), gpu="sm_90")
    with pytest.raises(TypeError, match="write causal=; if Sq != Sk"):
        cute_flash.warmup(is_causal=True, gpu="sm_90", **call)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="head_dim=513"):
        cute_flash.warmup(q_shape=(1, 1, 64, 513), dtype=torch.float16, gpu="sm_90")
    with pytest.raises(UnsupportedError, match="float64"):
        cute_flash.warmup(q_shape=(1, 1, 64, 64), dtype=torch.float64, gpu="sm_90")


def test_without_a_gpu_its_name_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    with pytest.raises(UnsupportedError, match='gpu="sm_90", or set CUTE_FLASH_ARCH'):
        cute_flash.warmup(attn())
    monkeypatch.setenv("CUTE_FLASH_ARCH", "sm_86")
    assert recorded_keys(attn(), module.override())[0].target == "sm_86"


def test_a_step_that_reads_values() -> None:
    lengths = offsets(3, 5)
    with pytest.raises(UnsupportedError, match="the step reads the values of a tensor"):
        cute_flash.warmup(lambda: attn(*qkv(seqlen_q=int(lengths[1])))(), gpu="sm_90")


# ---- kernels, compiled and found


@pytest.fixture
def builds(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[LaunchKey]:
    """The keys that a stand-in for the compiler was given, in this process."""
    keys: list[LaunchKey] = []

    def build(key: LaunchKey) -> tuple[bytes, str]:
        keys.append(key)
        return b"a kernel", ".so"

    monkeypatch.setattr(kernels, "compile_object", build)
    monkeypatch.setattr(kernels, "load_object", lambda path: lambda *arguments: None)
    return keys


CALL: dict[str, Any] = dict(q_shape=(2, 4, 512, 64), dtype=torch.bfloat16, causal=True, backward=True)


def test_what_was_done(builds: list[LaunchKey], monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are planned for the GPU of the machine, so kernels are loaded."""
    monkeypatch.setattr(
        module, "recorded_keys", lambda calls, spec, **call: recorded_keys(calls, ARCHS["sm_90"], **call)
    )
    done = cute_flash.warmup(jobs=1, **CALL)
    assert (done.compiled, done.from_disk, done.in_memory) == (2, 0, 0) and len(builds) == 2
    assert done.seconds > 0
    again = cute_flash.warmup(CALL, jobs=1)
    assert (again.compiled, again.from_disk, again.in_memory) == (0, 0, 2)
    kernels.forget()
    loaded = cute_flash.warmup([CALL], jobs=1)
    assert (loaded.compiled, loaded.from_disk, loaded.in_memory) == (0, 2, 0)
    assert len(builds) == 2


def test_kernels_for_a_named_gpu_are_not_loaded(builds: list[LaunchKey]) -> None:
    assert cute_flash.warmup(gpu="sm_80", jobs=1, **CALL).compiled == len(builds) > 1
    assert not kernels._functions
    assert cute_flash.warmup(gpu="sm_80", jobs=1, **CALL).from_disk == len(builds)


def test_the_result_as_text() -> None:
    assert (
        str(WarmUp(3, 1, 2, 1, 4.26)) == "7 kernel(s) in 4.3 s: 3 compiled, 1 from the pack, 2 from disk, 1 in memory"
    )


@pytest.mark.compiles
def test_a_warmed_call_compiles_nothing(fresh_cache: Path) -> None:
    call = dict(q_shape=(1, 2, 64, 32), dtype=torch.float16)
    assert cute_flash.warmup(gpu="sm_80", **call).compiled == 1  # type: ignore[arg-type]

    class Loading(RecordingGpu):
        def kernel(self, key: CompileKey) -> Callable[..., None]:
            super().kernel(key)
            compiled_kernel(key)
            return lambda *arguments: None

    q = torch.zeros(1, 2, 64, 32, dtype=torch.float16)
    with use_gpu(Loading(ARCHS["sm_80"])) as gpu, claiming_cuda(), cute_flash.use_jit(False):
        cute_flash.attn(q, q, q)
        assert len(gpu.keys) == 1  # type: ignore[attr-defined]
        with pytest.raises(NotCompiledError):
            cute_flash.attn(q, q, q, causal=True)


SCRIPT = """
import sys, torch, cute_flash
print("started")
calls = [dict(q_shape=(1, 2, 64, 32), dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
print(cute_flash.warmup(calls, gpu="sm_80", jobs=2))
"""


@pytest.mark.compiles
def test_a_script_without_a_main_guard(fresh_cache: Path, tmp_path: Path) -> None:
    """The processes that compile do not run the script again."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    root = str(Path(cute_flash.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(path)], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    started, result = done.stdout.splitlines()
    assert started == "started" and "2 compiled" in result
    assert "[2/2]" in done.stderr


@pytest.mark.processes
def test_the_error_of_a_process(fresh_cache: Path) -> None:
    key = plan_forward(Problem(1, 2, 2, 100, 100, 64), ARCHS["sm_80"], "sm80").main
    keys = [CompileKey(name, key.static, key.tile, key.target, key.operands) for name in ("none", "no kernel")]
    with pytest.raises(KeyError, match="none"):
        list(kernels.precompile_all(keys, 2))


# ---- CUTE_FLASH_JIT=0


class Compiling(RecordingGpu):
    """Its kernels come from the compile cache, so with `use_jit(False)` a missing kernel is an error."""

    def kernel(self, key: CompileKey) -> Callable[..., None]:
        self.missing: LaunchKey = key
        return compiled_kernel(key)

    def chain(self, key: LaunchChain) -> Callable[..., None]:
        self.missing = key
        return compiled_kernel(key)


@pytest.fixture
def gpu(fresh_cache: Path) -> Iterator[Compiling]:
    with use_gpu(Compiling(ARCHS["sm_90"])) as gpu, claiming_cuda(), launching_operators(), cute_flash.use_jit(False):
        yield gpu  # type: ignore[misc]


def test_the_message(gpu: Compiling) -> None:
    q, k = leaf(2, 4, 512, 64), leaf(2, 2, 512, 64)
    with pytest.raises(NotCompiledError) as caught:
        cute_flash.attn(q, k, k, causal=True, softcap=20.0)
    assert str(caught.value) == (
        "fwd_sm90 D=64 bfloat16 right softcap 192x128 for sm_90a is not compiled, and the JIT is off (CUTE_FLASH_JIT=0 "
        "or use_jit(False)): compile it before with cute_flash.warmup(q_shape=(2, 4, 512, 64), "
        "k_shape=(2, 2, 512, 64), dtype=torch.bfloat16, causal=True, softcap=20.0, backward=True)"
    )


def suggested(message: str) -> str:
    return message.partition("compile it before with ")[2]


NAMES: dict[str, Any] = dict(
    q=leaf(2, 4, 512, 64),
    alibi=torch.zeros(4),
    sinks=torch.zeros(4),
    bias=leaf(4, 512, 512),
    score_mod=lambda score, b, h, i, j: score * TABLE[h],
    score_mod_bwd=lambda grad, score, b, h, i, j: grad * 2.0,
    mask_mod=cute_flash.masks.causal(),
    block_mask=BLOCK_MASK,
)
CALLS = [
    "causal=True",
    "window=(64, 3)",
    "window=(64, None), attention_chunk=128",
    "softcap=3.0, dropout=0.1, deterministic=True",
    "batch_invariant=True, out_dtype=torch.float32",
    "return_max_logit=True, alibi=alibi, sinks=sinks",
    "bias=bias",
    "score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod",
    "block_mask=block_mask",
    "layout='bshd'",
]


def missing_kernel(gpu: Compiling, run: Callable[[], Any]) -> tuple[LaunchKey, str]:
    with pytest.raises(NotCompiledError) as caught:
        run()
    return gpu.missing, suggested(str(caught.value))


def kernels_of(text: str, names: dict[str, Any]) -> list[LaunchKey]:
    """The kernels of a suggested warm-up."""
    keys: list[LaunchKey] = []

    def warmup(calls: Any = None, **call: Any) -> None:
        keys.extend(recorded_keys(calls, ARCHS["sm_90"], **call))

    class Library:
        attn_varlen, attn_decode, use_kernels = cute_flash.attn_varlen, cute_flash.attn_decode, cute_flash.use_kernels

    Library.warmup = staticmethod(warmup)  # type: ignore[attr-defined]
    exec(text, {"cute_flash": Library, "torch": torch, **names})
    return keys


@pytest.mark.parametrize("options", CALLS)
def test_the_suggested_warmup_has_the_missing_kernel(gpu: Compiling, options: str) -> None:
    names = dict(NAMES, torch=torch)
    call = f"cute_flash.attn(q, q, q, {options})"
    key, text = missing_kernel(gpu, lambda: eval(call, {"cute_flash": cute_flash, **names}))
    assert key in kernels_of(text, names)


def test_the_suggested_warmup_of_a_family(gpu: Compiling) -> None:
    q = leaf(2, 4, 512, 64)
    with cute_flash.use_kernels("sm80"):
        key, text = missing_kernel(gpu, lambda: cute_flash.attn(q, q, q))
    assert text.startswith("with cute_flash.use_kernels('sm80'): cute_flash.warmup(")
    assert key in kernels_of(text, {})


def test_the_suggested_warmup_of_a_varlen_call(gpu: Compiling) -> None:
    names = dict(q=leaf(700, 4, 64), k=leaf(700, 4, 64), v=leaf(700, 4, 64))
    cu = dict(cu_seqlens_q=offsets(100, 700), cu_seqlens_k=offsets(100, 700))
    key, text = missing_kernel(gpu, lambda: cute_flash.attn_varlen(*names.values(), **cu, causal=True))
    assert text == (
        "cute_flash.warmup(lambda: cute_flash.attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True).sum()"
        ".backward())"
    )
    assert key in kernels_of(text, {**names, **cu})


@torch.no_grad()
def test_the_suggested_warmup_of_a_decode_call(gpu: Compiling) -> None:
    names = dict(q=torch.zeros(3, 1, 8, 64, **BF16), k_cache=torch.zeros(3, 256, 2, 64, **BF16))
    names["v_cache"] = names["k_cache"].clone()
    names["cache_seqlens"] = offsets(1, 2)
    key, text = missing_kernel(gpu, lambda: cute_flash.attn_decode(**names, window=(16, None), softcap=2.0))
    assert text == (
        "cute_flash.warmup(lambda: cute_flash.attn_decode(q, k_cache, v_cache, cache_seqlens=cache_seqlens, "
        "window=(16, None), softcap=2.0))"
    )
    assert key in kernels_of(text, names)


def test_the_suggested_warmup_of_gradients(gpu: Compiling, builds: list[LaunchKey]) -> None:
    """The forward kernel is there, and that of the backward with a gradient of the LSE is not."""
    q = leaf(2, 4, 512, 64)
    with cute_flash.use_jit(True):
        out, lse = cute_flash.attn(q, q, q, return_lse=True)
    key, text = missing_kernel(gpu, (out.sum() + lse.sum()).backward)
    assert "return_lse=True, backward=True" in text
    assert key in kernels_of(text, {})


@pytest.mark.processes
def test_the_environment_variable() -> None:
    code = "from cute_flash.jit.policy import jit_is_on; print(jit_is_on())"
    for value, expected in (("0", "False"), ("1", "True"), ("", "True")):
        env = {**os.environ, "CUTE_FLASH_JIT": value}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
