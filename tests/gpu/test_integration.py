"""The operator in torch on a GPU: streams, CUDA graphs, memory, torch.compile, errors."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cute_flash
from cute_flash.runtime import counters
from cute_flash.spec.args import AttentionArgs, to_schema
from cute_flash.spec.band import Band
from tests import cases
from tests.gpu.captured import Captured

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]

CAUSAL = Band(None, 0)
CASE = cases.Case(2, 8, 2, 700, 900, 128, CAUSAL)


@pytest.fixture
def qkv():
    return cases.make_inputs(CASE, torch.bfloat16, "cuda")


def test_cuda_graph(qkv):
    q, k, v = qkv
    captured = Captured.of(lambda: cute_flash.attn(q, k, v, causal=True, return_lse=True))
    out, lse = captured.results
    for seed in range(3):
        for static, fresh in zip(
            (q, k, v), cases.make_inputs(CASE, torch.bfloat16, "cuda", seed=seed + 1), strict=True
        ):
            static.copy_(fresh)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        captured.replay()
        cases.assert_is_attention(out, lse, q, k, v, CAUSAL)


def test_side_stream(qkv):
    """The kernel runs on the current stream: it sees earlier writes of this stream, and other streams do not wait."""
    q, k, v = qkv
    expected = cute_flash.attn(q, k, v, causal=True)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        out = cute_flash.attn(late, k, v, causal=True)
        done = stream.record_event()
    # The default stream is idle while the side stream still sleeps: a launch on the wrong stream would have
    # read zeros.
    torch.cuda.default_stream().synchronize()
    assert not done.query()
    stream.synchronize()
    assert torch.equal(out, expected)


def test_streams_side_by_side(qkv):
    """Concurrent launches do not share tile counters."""
    expected = cute_flash.attn(*qkv, causal=True)
    captured = Captured.of(lambda: cute_flash.attn(*qkv, causal=True))
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(cute_flash.attn(*qkv, causal=True))
        captured.graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in (*outputs, captured.results))


def test_counters_are_left_at_zero(qkv, family):
    for window in ((None, 0), (100, None), (30, 20), (None, None)):
        cute_flash.attn(*qkv, window=window)
    torch.cuda.synchronize()
    assert counters._counters or family != "sm90"
    assert all(counter.item() == 0 for counter, _ in counters._counters.values())


def test_warm_call_does_not_synchronise(qkv):
    q, k, v = qkv
    cute_flash.attn(q, k, v, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cute_flash.attn(q, k, v, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_warm_call_allocates_its_outputs_only(qkv):
    q, k, v = qkv
    cute_flash.attn(q, k, v, causal=True)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    cute_flash.attn(q, k, v, causal=True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_device(qkv):
    moved = [x.to("cuda:1") for x in qkv]
    assert torch.equal(cute_flash.attn(*moved, causal=True).cpu(), cute_flash.attn(*qkv, causal=True).cpu())


def test_torch_compile(qkv):
    attend = torch.compile(lambda q, k, v: cute_flash.attn(q * 1, k, v, causal=True) + 1, fullgraph=True, dynamic=True)
    for seqlen in (700, 333, 64):
        q, k, v = (x[:, :, :seqlen] for x in qkv)
        torch.testing.assert_close(attend(q, k, v), cute_flash.attn(q, k, v, causal=True) + 1, rtol=0, atol=0)


def test_torch_compile_with_cuda_graphs(qkv):
    """The warm-up runs outside a capture but allocates from the graph's pool, so no counter may stay in that memory."""
    attend = torch.compile(lambda q, k, v: cute_flash.attn(q, k, v, causal=True) * 1, mode="reduce-overhead")
    expected = cute_flash.attn(*qkv, causal=True)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(attend(*qkv).clone(), expected, rtol=0, atol=0)


def test_torch_compile_with_mods(qkv):
    """Captured tensors and numbers change between calls; a block mask carries its mask. Forward and gradients."""
    qkv = [x[:, :, :640].requires_grad_() for x in qkv]
    table = torch.randn(8, 640, device="cuda", requires_grad=True)
    bias = torch.randn(640, 640, device="cuda", requires_grad=True)
    ids = torch.arange(640, device="cuda") // 150
    block_mask = cute_flash.BlockMask.of(cute_flash.masks.document(ids), (2, 8, 640, 640))

    def plain(q, k, v, table, width):
        def near(b, h, i, j):
            return (i >= j) & (i - j < width)

        out = cute_flash.attn(q, k, v, bias=bias, score_mod=lambda s, b, h, i, j: s + table[h, j], mask_mod=near)
        return out + cute_flash.attn(q, k, v, score_mod=lambda s, b, h, i, j: s * 0.5, block_mask=block_mask)

    attend = torch.compile(plain, fullgraph=True)
    for width in (100, 37, 500):
        got, want = attend(*qkv, table, width), plain(*qkv, table, width)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        inputs = [*qkv, table, bias]
        grads = [torch.autograd.grad(x.float().square().sum(), inputs) for x in (got, want)]
        for a, b in zip(*grads):
            # The same kernels: only the order of atomic additions differs, by one bf16 rounding at most.
            torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3 * float(b.abs().max()))
        with torch.no_grad():
            table.copy_(torch.randn(8, 640, device="cuda"))


def test_nan_in_blocks_that_no_query_visits(qkv):
    """A tile does not read K/V blocks that the causal mask hides from all of its queries: NaN there has no effect."""
    q, k, v = (torch.randn(1, 2, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    clean = cute_flash.attn(q, k, v, causal=True)
    k[:, :, 768:] = v[:, :, 768:] = torch.nan
    dirty = cute_flash.attn(q, k, v, causal=True)
    torch.testing.assert_close(dirty[:, :, :512], clean[:, :, :512], rtol=0, atol=0)
    assert dirty[:, :, 768:].isnan().all()


def test_opcheck(qkv):
    args = to_schema(AttentionArgs(scale=0.1, window_right=0))
    torch.library.opcheck(torch.ops.cute_flash.attention_fwd.default, (*qkv, *args))


def test_modes_and_profilers_see_the_op(qkv):
    """A call that nothing observes may bypass the dispatcher; an observed call may not."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    expected = cute_flash.attn(*qkv, causal=True)
    with Watch():
        watched = cute_flash.attn(*qkv, causal=True)
    assert torch.ops.cute_flash.attention_fwd.default in seen
    assert torch.equal(watched, expected)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cute_flash.attn(*qkv, causal=True)
    assert any(event.key == "cute_flash::attention_fwd" for event in profile.key_averages())


class Listening(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["plain", "softcap", "sinks", "bias", "mask"])
def test_gradients_with_and_without_the_dispatcher(qkv, name):
    """Both ways give the same bits."""
    more = {
        "plain": {},
        "softcap": {"softcap": 5.0},
        "sinks": {"sinks": torch.linspace(-1, 1, CASE.heads, device="cuda")},
        "bias": {"bias": torch.linspace(-1, 1, CASE.seqlen_k, device="cuda", dtype=torch.bfloat16)},
        "mask": {"mask_mod": lambda b, h, q, kv: (q - kv).abs() != 70},
    }[name]
    leaves = [x.requires_grad_() for x in (*qkv, *(x for x in more.values() if isinstance(x, torch.Tensor)))]
    found = []
    for mode in (contextlib.nullcontext(), Listening()):
        with mode:
            out, lse = cute_flash.attn(*qkv, causal=True, deterministic=True, return_lse=True, **more)
            finite = torch.where(lse == -torch.inf, 0, lse)
            found.append([out, *torch.autograd.grad(out.float().sin().sum() + finite.sum(), leaves)])
    assert all(map(torch.equal, *found))


def test_nested_transforms(qkv):
    q, k, v = qkv

    def loss(q, k):
        return cute_flash.attn(q, k, v, deterministic=True).float().square().sum()

    found = torch.func.grad(lambda q: torch.func.grad_and_value(lambda k: loss(q, k))(k)[1])(q)
    leaf = q.clone().requires_grad_()
    assert torch.equal(found, torch.autograd.grad(loss(leaf, k), leaf)[0])


def test_backward_that_no_kernel_computes_is_refused(family):
    if family == "sm80":
        pytest.skip("the sm80 family has a kernel for this gradient")
    q, k = (torch.randn(1, 2, 64, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def long_mod(score, b, h, q, kv):
        for i in range(8):
            score = torch.where((q - kv) % (i + 2) == 0, score * 0.5 + i, score)
        return score

    assert cute_flash.supports(q, k, k, score_mod=long_mod)
    refused = cute_flash.supports(q.requires_grad_(), k, k, score_mod=long_mod).reason
    for mode in (contextlib.nullcontext(), Listening()):
        with mode, torch.no_grad():
            cute_flash.attn(q, k, k, score_mod=long_mod)
        message = r"the gradient of attn with score_mod .* operations per score"
        with mode, pytest.raises(cute_flash.UnsupportedError, match=message) as error:
            cute_flash.attn(q, k, k, score_mod=long_mod)
        assert str(error.value) == refused
    with pytest.raises(Exception, match=r"the gradient of a score_mod, .* in float32 on cuda"):
        compiled = torch.compile(lambda x: cute_flash.attn(x, x, x, score_mod=lambda s, b, h, i, j: 2 * s))
        compiled(q.detach().float().requires_grad_())


def test_kernel_family_by_hand(qkv, family):
    chosen = cute_flash.attn(*qkv, causal=True)
    with cute_flash.use_kernels("sm80"):
        other = cute_flash.attn(*qkv, causal=True)
    # Sums have another order, so only rounding differs.
    assert torch.equal(chosen, other) == (family == "sm80")
    torch.testing.assert_close(chosen.float(), other.float(), rtol=0.0, atol=0.02)


def test_supports_says_what_attn_does(qkv):
    q, k, v = qkv
    assert cute_flash.supports(q, k, v, causal=True)
    for bad in ([x.double() for x in qkv], [x[..., :12] for x in qkv], [q[:, :3], k, v]):
        answer = cute_flash.supports(*bad)
        assert not answer
        with pytest.raises(ValueError) as error:
            cute_flash.attn(*bad)
        assert str(error.value) == answer.reason
