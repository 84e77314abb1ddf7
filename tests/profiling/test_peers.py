from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import flex_attention

import cute_flash
from cute_flash import reference
from cute_flash.spec.band import Band
from profiling.measure.launches import needed_kernels
from profiling.peers import flash_attention, flex
from profiling.peers.cute_flash import our_peer
from profiling.peers.flash_attention import bshd_peer
from profiling.peers.flex import flex_peer
from profiling.peers.peer import NO_GPU, Peer, as_bhsd
from profiling.peers.registry import DEFAULT_NAMES, OURS, registry, select, split_available
from profiling.peers.sdpa import sdpa_peer
from tests.fakes.cuda import claiming_cuda
from tests.fakes.gpu import fake_gpu


@pytest.fixture
def pretend_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    forget = flash_attention.fa3_ops.cache_clear
    forget()
    yield
    forget()


def inputs(heads_kv: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((2, heads, 33, 16), generator=generator) for heads in (4, heads_kv, heads_kv))
    return q, k, v


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a GPU")
def test_without_a_gpu_all_are_absent_and_say_so():
    available, absent = split_available(select(DEFAULT_NAMES))
    assert available == []
    assert absent == dict.fromkeys(DEFAULT_NAMES, NO_GPU)


def test_a_missing_package_is_named(pretend_gpu, monkeypatch):
    monkeypatch.delenv("FA3_DIR", raising=False)
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface", "ffpa_attn"):
        # None in sys.modules makes the import fail as if nothing were installed.
        monkeypatch.setitem(sys.modules, module, None)
    reasons = {name: registry()[name].available() for name in ("fa3", "fa4", "flash_attn", "ffpa")}
    assert "flash_attn_interface" in str(reasons["fa3"])
    assert "flash_attn.cute" in str(reasons["fa4"])
    assert "flash_attn" in str(reasons["flash_attn"])
    assert "ffpa_attn" in str(reasons["ffpa"])


def test_an_fa3_folder_without_the_op_is_named(pretend_gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("FA3_DIR", str(tmp_path))
    assert str(registry()["fa3"].available()).startswith(f"FileNotFoundError: FA3_DIR={tmp_path} holds no _C.so;")


def test_an_fa3_op_that_does_not_load_is_no_crash(pretend_gpu, monkeypatch, tmp_path):
    (tmp_path / "_C.so").write_bytes(b"not a library")
    monkeypatch.setenv("FA3_DIR", str(tmp_path))
    assert str(registry()["fa3"].available()).startswith("OSError: ")


def test_a_package_that_breaks_on_import_is_a_reason(pretend_gpu):
    def load():
        raise RuntimeError("built for another torch")

    _, absent = split_available([bshd_peer("peer", load)])
    assert absent == {"peer": "RuntimeError: built for another torch"}


def test_ours_comes_first_and_variants_only_by_name():
    assert DEFAULT_NAMES[0] == "cute_flash"
    assert "cute_flash-sm80" not in DEFAULT_NAMES and "flex" not in DEFAULT_NAMES and "flex" in registry()
    chosen = select(["cute_flash-sm80", "cute_flash", "sdpa-flash", "cute_flash"], kernels="sm90")
    assert [peer.name for peer in chosen] == ["cute_flash-sm80", "cute_flash", "sdpa-flash"]
    assert [one.context.args for one in chosen[:2]] == [("sm80",), ("sm90",)]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'fa5'.*sdpa-flash"):
        select(["cute_flash", "fa5"])


def test_head_dims_of_the_peers():
    """Only torch's memory-efficient backend, FlexAttention and FFPA take head dims above 256."""
    taken = {d: {name for name, peer in registry().items() if peer.takes(d)} for d in (64, 256, 264, 320, 512)}
    everywhere = {*OURS, "sdpa-efficient", "flex"}
    assert taken[64] == taken[256] == {*registry()} - {"ffpa"}
    assert taken[264] == everywhere and taken[320] == taken[512] == everywhere | {"ffpa"}
    assert "ffpa" not in DEFAULT_NAMES


def test_flex_compiles_for_every_cell_anew(monkeypatch):
    done = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: done.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: done.append((function, dynamic)))
    monkeypatch.setattr(flex, "importlib", SimpleNamespace(import_module=lambda name: None))
    q, k, _ = inputs()
    flex._make_forward(q, k, False)
    assert done == ["reset", (flex_attention, False)]


def test_flex_without_triton_says_so(pretend_gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton" in str(flex_peer().available())


def test_bshd_peers_get_their_own_contiguous_tensors_with_the_same_values():
    tensors, seen = inputs(), []

    def load():
        def forward(q, k, v, causal):
            seen.append((q, k, v, causal))
            return q

        return forward

    peer = bshd_peer("peer", load)
    call = peer.prepare(*tensors, True)
    out = as_bhsd(peer, call())
    assert torch.equal(out, tensors[0])
    *got, causal = seen[0]
    assert causal is True
    for mine, given in zip(got, tensors, strict=True):
        assert mine.shape == (2, 33, 4, 16) and mine.is_contiguous()
        assert torch.equal(mine, given.transpose(1, 2)) and mine.data_ptr() != given.data_ptr()
    # A second call converts nothing again.
    call()
    assert seen[1][0] is seen[0][0]


def test_kernels_are_chosen_around_the_calls_not_in_them(monkeypatch):
    chosen = []

    def use_kernels(family):
        chosen.append(family)
        return nullcontext()

    stub = SimpleNamespace(attn=lambda q, k, v, causal: ("attn", causal), use_kernels=use_kernels)
    monkeypatch.setattr(importlib, "import_module", lambda name: {"cute_flash": stub}[name])
    our_peer().context()
    assert chosen == []
    peer = our_peer(kernels="sm80")
    peer.context()
    assert chosen == ["sm80"]
    assert peer.prepare(*inputs(), True)() == ("attn", True)
    assert chosen == ["sm80"]


class FakeFa3:
    """A fake of FlashAttention-3's two ops. The backward fills the given tensors and returns something else."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def fwd(self, q, k, v, *, softmax_scale, is_causal, num_splits):
        self.calls.append("fwd")
        tensors, band = [x.transpose(1, 2) for x in (q, k, v)], Band.of(is_causal, (None, None))
        out, lse, _ = reference.forward(*tensors, reference.plain_args(tensors[0], band, softmax_scale))
        return out.transpose(1, 2).contiguous(), lse, None, None

    def bwd(self, dout, q, k, v, out, softmax_lse, *, dq, dk, dv, softmax_scale, is_causal):
        self.calls.append("bwd")
        assert all(x.is_contiguous() for x in (dout, q, k, v, out, dq, dk, dv))
        dO, Q, K, V, O = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        args = reference.plain_args(Q, Band.of(is_causal, (None, None)), softmax_scale)
        *grads, _ = reference.backward(dO, None, Q, K, V, O, softmax_lse, args)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad.transpose(1, 2))
        return softmax_lse, None


def fake_ffpa(calls: list[str]) -> Any:
    """A fake of the module of FFPA, which asks for `enable_gqa` as SDPA does."""

    def ffpa_attn_func(query, key, value, *, is_causal, enable_gqa, backend):
        calls.append("fwd")
        assert backend == "backend" and enable_gqa == (query.shape[1] != key.shape[1])
        return reference.dense(query, key, value, Band.of(is_causal, (None, None)))[0].to(query.dtype)

    return SimpleNamespace(CuTeDSLBackend=lambda: "backend", ffpa_attn_func=ffpa_attn_func)


@pytest.fixture
def forwards(monkeypatch, eager_flex) -> list[str]:
    """Peers whose libraries are replaced, or run uncompiled; the forward passes and backward ops that they run."""
    calls: list[str] = []

    def flex_stand_in(q, k, v, block_mask, enable_gqa):
        calls.append("fwd")
        assert enable_gqa == (q.shape[1] != k.shape[1])
        # FlexAttention has no gradients on the CPU.
        if not q.requires_grad:
            return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)
        return reference.dense(q, k, v, Band.of(block_mask is not None, (None, None)))[0].to(q.dtype)

    monkeypatch.setattr(flex, "compiled_flex", lambda: flex_stand_in)
    monkeypatch.setattr(flex, "_load", lambda: flex._make_forward)  # without triton
    monkeypatch.setattr(flash_attention, "fa3_ops", lambda: FakeFa3(calls))
    monkeypatch.setitem(sys.modules, "ffpa_attn", fake_ffpa(calls))
    return calls


def make(name: str, forwards: list[str]) -> Peer:
    def dense_bshd(q, k, v, causal):
        forwards.append("fwd")
        assert q.shape == (2, 33, 4, 16) and all(x.is_contiguous() and x.is_leaf for x in (q, k, v))
        out, _ = reference.dense(*(x.transpose(1, 2) for x in (q, k, v)), Band.of(causal, (None, None)))
        return out.transpose(1, 2).to(q.dtype)

    makes = {"sdpa": lambda: sdpa_peer("sdpa", SDPBackend.MATH), "bshd": lambda: bshd_peer("bshd", lambda: dense_bshd)}
    return makes[name]() if name in makes else registry()[name]


every_peer = pytest.mark.parametrize("name", ["cute_flash", "sdpa", "flex", "bshd", "fa3", "ffpa"])
masks = pytest.mark.parametrize("causal", [False, True])
heads = pytest.mark.parametrize("heads_kv", [4, 2])


@every_peer
@masks
@heads
def test_a_peer_is_attention(forwards, name, causal, heads_kv):
    peer, tensors = make(name, forwards), inputs(heads_kv)
    with torch.no_grad(), peer.context():
        out = as_bhsd(peer, peer.prepare(*tensors, causal)())
    exact, _ = reference.dense(*tensors, Band.of(causal, (None, None)))
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


@every_peer
@masks
@heads
def test_gradients_are_those_of_attention_and_can_be_had_again(forwards, name, causal, heads_kv):
    peer, tensors = make(name, forwards), inputs(heads_kv)
    dout = torch.randn((2, 4, 33, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), peer.context():
        call = peer.prepare_backward(*tensors, dout, causal)
        first, second = call(), call()
    assert all(map(torch.equal, first, second)) and first[0].data_ptr() != second[0].data_ptr()
    # The forward pass runs once.
    assert forwards in ([], ["fwd"], ["fwd", "bwd", "bwd"])
    # The inputs belong to all peers.
    assert not any(x.requires_grad for x in (*tensors, dout))
    q, k, v = leaves = [x.double().requires_grad_() for x in tensors]
    out, _ = reference.dense(q, k, v, Band.of(causal, (None, None)))
    exact = torch.autograd.grad(out, leaves, dout.double())
    for mine, theirs in zip(second, exact, strict=True):
        found = as_bhsd(peer, mine)
        assert found.shape == theirs.shape and not found.requires_grad
        torch.testing.assert_close(found.double(), theirs, atol=1e-5, rtol=1e-5)


def test_peers_without_a_backward_give_a_reason(pretend_gpu, monkeypatch):
    # An FA3 that was built without it.
    monkeypatch.setattr(flash_attention, "fa3_ops", lambda: SimpleNamespace(fwd=None))
    chosen = select(["cute_flash", "cute_flash-sm80", "sdpa-cudnn", "fa3"])
    assert split_available(chosen)[1] == {}
    available, absent = split_available(chosen, "bwd")
    assert [peer.name for peer in available] == ["cute_flash", "cute_flash-sm80", "sdpa-cudnn"]
    assert absent["fa3"].startswith("AttributeError: ") and "bwd" in absent["fa3"]


@pytest.mark.parametrize(("gpu", "name"), [("A100", "sm_80"), ("L40S", "sm_89")])
def test_tiles_of_another_gpu_compiled_for_the_gpu_here(gpu: str, name: str) -> None:
    peer = registry()[f"cute_flash-{gpu}"]
    assert peer.is_ours and peer.name not in DEFAULT_NAMES
    tensors = [torch.randn(1, 2, 70, 256).bfloat16() for _ in range(4)]

    def gradients() -> list[Tensor]:
        leaves = [x.requires_grad_() for x in tensors[:3]]
        return list(torch.autograd.grad(peer.load()(*leaves[:2], True)(*leaves), leaves, tensors[3]))

    def in_context() -> list[Tensor]:
        with peer.context():
            return gradients()

    with fake_gpu(name) as there, claiming_cuda():
        expected = gradients()
    with fake_gpu("sm_90") as here, claiming_cuda():
        needed = needed_kernels([in_context])
        found = in_context()
        gradients()
    own = [launch.key for launch in there.launches]
    keys = [launch.key for launch in here.launches]
    borrowed, ours = keys[: len(own)], keys[len(own) :]
    assert borrowed == [replace(key, target="sm_90") for key in own] and len(own) > 3
    assert {one for key in needed for one in key.keys} == set(borrowed)
    assert {key.kernel for key in ours} >= {"fwd_sm90", "bwd_sm90_wide"}
    with cute_flash.use_kernels("sm80"), fake_gpu("sm_90") as hopper, claiming_cuda():
        gradients()
    assert hopper.main.key.tile != here.launches[len(own) - 1].key.tile
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
