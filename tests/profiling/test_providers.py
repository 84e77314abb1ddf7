from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cute_flash import reference
from cute_flash.band import Band
from profiling import providers
from profiling.providers import (
    DEFAULT_NAMES,
    NO_GPU,
    CuteFlash,
    FlashAttention,
    Sdpa,
    as_bhsd,
    registry,
    select,
    split_available,
)


@pytest.fixture
def pretend_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    providers._fa3_forward.cache_clear()
    yield
    providers._fa3_forward.cache_clear()


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
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        # None in sys.modules makes the import fail as if nothing were installed.
        monkeypatch.setitem(sys.modules, module, None)
    reasons = {name: registry()[name].available() for name in ("fa3", "fa4", "flash_attn")}
    assert "flash_attn_interface" in str(reasons["fa3"])
    assert "flash_attn.cute" in str(reasons["fa4"])
    assert "flash_attn" in str(reasons["flash_attn"])


def test_an_fa3_folder_without_the_op_is_named(pretend_gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("FA3_DIR", str(tmp_path))
    assert registry()["fa3"].available() == f"FileNotFoundError: FA3_DIR={tmp_path} holds no _C.so"


def test_an_fa3_op_that_does_not_load_is_no_crash(pretend_gpu, monkeypatch, tmp_path):
    (tmp_path / "_C.so").write_bytes(b"not a library")
    monkeypatch.setenv("FA3_DIR", str(tmp_path))
    assert str(registry()["fa3"].available()).startswith("OSError: ")


def test_a_package_that_breaks_on_import_is_a_reason(pretend_gpu):
    def load():
        raise RuntimeError("built for another torch")

    _, absent = split_available([FlashAttention("peer", load)])
    assert absent == {"peer": "RuntimeError: built for another torch"}


def test_ours_comes_first_and_variants_only_by_name():
    assert DEFAULT_NAMES[0] == "cute_flash"
    assert "cute_flash-sm80" not in DEFAULT_NAMES
    chosen = select(["cute_flash-sm80", "cute_flash", "sdpa-flash", "cute_flash"], kernels="sm90")
    assert [provider.name for provider in chosen] == ["cute_flash-sm80", "cute_flash", "sdpa-flash"]
    assert [p.kernels for p in chosen if isinstance(p, CuteFlash)] == ["sm80", "sm90"]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'fa5'.*sdpa-flash"):
        select(["cute_flash", "fa5"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_sdpa_is_attention(causal, heads_kv):
    provider, tensors = Sdpa("sdpa", SDPBackend.MATH), inputs(heads_kv)
    with provider.context():
        out = as_bhsd(provider, provider.prepare(*tensors, causal)())
    exact, _ = reference.dense(*tensors, Band.of(causal, (None, None)))
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


def test_bshd_peers_get_their_own_contiguous_tensors_with_the_same_values():
    tensors, seen = inputs(), []

    def load():
        def forward(q, k, v, causal):
            seen.append((q, k, v, causal))
            return q

        return forward

    provider = FlashAttention("peer", load)
    call = provider.prepare(*tensors, True)
    out = as_bhsd(provider, call())
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
    CuteFlash().context()
    assert chosen == []
    provider = CuteFlash(kernels="sm80")
    provider.context()
    assert chosen == ["sm80"]
    assert provider.prepare(*inputs(), True)() == ("attn", True)
    assert chosen == ["sm80"]
