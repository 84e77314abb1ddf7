"""Architectures: names, the override, and the properties that `detect` reads from the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from cute_flash.spec import arch
from cute_flash.spec.arch import ARCHS, KIB
from cute_flash.spec.problem import UnsupportedError

KNOWN = "sm_80, sm_86, sm_89, sm_90, sm_120, sm_121"
ELSEWHERE = "on data-centre Blackwell, use torch's SDPA with cuDNN, or FlashAttention-4"


@pytest.mark.parametrize("name", ["sm_80", "sm80", "80", "SM_80", "86", "sm_89", "sm_90", "sm_90a", "sm90a", "sm_120a"])
def test_by_name(name: str) -> None:
    digits = name.lower().removeprefix("sm").removeprefix("_").removesuffix("a")
    assert arch.by_name(name) is ARCHS[f"sm_{digits}"]


@pytest.mark.parametrize(
    ("name", "gpu", "arch_name"),
    [
        ("h200", "H200", "sm_90"),
        ("RTX 5090", "RTX 5090", "sm_120"),
        ("rtx5090", "RTX 5090", "sm_120"),
        ("rtx pro 6000", "RTX PRO 6000", "sm_120"),
        ("GB10", "GB10", "sm_121"),
    ],
)
def test_by_name_of_a_gpu(name: str, gpu: str, arch_name: str) -> None:
    found = arch.by_name(name)
    assert (found.gpu, found.name) == (gpu, arch_name)


@pytest.mark.parametrize("name", ["sm_100a", "sm_103", "110", "B200", "gb300"])
def test_by_name_of_data_centre_blackwell_says_what_to_use(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^architecture '{name}': use one of {KNOWN}.*{ELSEWHERE}$"):
        arch.by_name(name)


@pytest.mark.parametrize("name", ["sm_75", "sm_100a", "hopper", "", "a", "sm_"])
def test_by_name_of_another_gpu_lists_the_known_ones(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^architecture '{name}': use one of {KNOWN}"):
        arch.by_name(name)


def test_numbers_are_those_of_the_programming_guide() -> None:
    # CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory in KiB.
    found = {
        name: (spec.capability, spec.smem_per_cta // KIB, spec.max_threads_per_sm, spec.has_wgmma, spec.target)
        for name, spec in ARCHS.items()
    }
    assert found == {
        "sm_80": ((8, 0), 163, 2048, False, "sm_80"),
        "sm_86": ((8, 6), 99, 1536, False, "sm_86"),
        "sm_89": ((8, 9), 99, 1536, False, "sm_89"),
        "sm_90": ((9, 0), 227, 2048, True, "sm_90"),
        "sm_120": ((12, 0), 99, 1536, False, "sm_120a"),
        "sm_121": ((12, 1), 99, 1536, False, "sm_121a"),
    }
    for name, spec in ARCHS.items():
        assert spec.name == name and spec.registers_per_sm == 65536
        # CUDA reserves 1 KB of shared memory per CTA.
        assert spec.smem_per_sm == spec.smem_per_cta + KIB


def test_ridge_points() -> None:
    assert ARCHS["sm_80"].ridge == pytest.approx(156, abs=0.5)
    assert ARCHS["sm_90"].ridge == pytest.approx(295, abs=0.5)


def test_override(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arch.override() is None
    monkeypatch.setenv("CUTE_FLASH_ARCH", "sm_90a")
    assert arch.override() is ARCHS["sm_90"]
    monkeypatch.setenv("CUTE_FLASH_ARCH", "")
    assert arch.override() is None
    monkeypatch.setenv("CUTE_FLASH_ARCH", "sm_70")
    with pytest.raises(UnsupportedError, match="architecture 'sm_70'"):
        arch.override()


Install = Callable[..., None]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`gpu(name, (major, minor), sms, l2)` sets the properties that the driver reports for every device."""

    def install(name: str, capability: tuple[int, int], sms: int, l2: int | None = None) -> None:
        properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1], multi_processor_count=sms)
        if l2 is not None:
            properties.L2_cache_size = l2
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        arch.detect.cache_clear()

    yield install
    # Clear the cache of detected GPUs after the test.
    arch.detect.cache_clear()


@pytest.mark.parametrize(
    ("name", "capability", "hbm_tbps"),
    [
        ("NVIDIA H200", (9, 0), 4.8),
        ("NVIDIA H100 80GB HBM3", (9, 0), 3.35),
        ("NVIDIA H100 PCIe", (9, 0), 2.0),
        ("NVIDIA GH200 480GB", (9, 0), 4.0),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 2.0),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 1.555),
        ("NVIDIA A100-PCIE-40GB", (8, 0), 1.555),
        ("NVIDIA A10", (8, 6), 0.6),
        ("NVIDIA L40S", (8, 9), 0.864),
        ("NVIDIA GeForce RTX 5090", (12, 0), 1.792),
        ("NVIDIA GeForce RTX 5070 Ti", (12, 0), 0.896),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 1.792),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 1.597),
        ("NVIDIA GB10", (12, 1), 0.273),
    ],
)
def test_detect_knows_the_bandwidth_of_parts_that_differ_only_in_it(
    gpu: Install, name: str, capability: tuple[int, int], hbm_tbps: float
) -> None:
    gpu(name, capability, 100, 123 << 20)
    found = arch.detect(0)
    assert found.hbm_tbps == hbm_tbps
    assert found.capability == capability


def test_detect_takes_sms_and_l2_from_the_driver_once_and_the_rest_from_the_table(
    gpu: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108)
    assert arch.detect(0).l2_bytes == ARCHS["sm_80"].l2_bytes, "the driver does not know it"
    gpu("NVIDIA H200", (9, 0), 131, 60 << 20)
    found = arch.detect(0)
    assert (found.name, found.gpu, found.num_sms, found.l2_bytes) == ("sm_90", "NVIDIA H200", 131, 60 << 20)
    assert found.smem_per_cta == ARCHS["sm_90"].smem_per_cta
    assert found.tensor_tflops == ARCHS["sm_90"].tensor_tflops
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    assert arch.detect(0) is found


def test_detect_knows_the_rates_of_a_part_by_its_name(gpu: Install) -> None:
    for name, capability, tflops in (
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 503.8),
        ("NVIDIA GeForce RTX 5080", (12, 0), arch.SM_120.tensor_tflops),
        # "A100" is a part of the name, but a GPU of another architecture.
        ("NVIDIA RTX A1000", (8, 6), arch.SM_86.tensor_tflops),
    ):
        gpu(name, capability, 84)
        found = arch.detect(0)
        assert (found.gpu, found.num_sms, found.tensor_tflops) == (name, 84, tflops)


@pytest.mark.parametrize(
    ("name", "capability", "remedy"),
    [
        ("NVIDIA B200", (10, 0), ELSEWHERE),
        ("NVIDIA B300", (10, 3), ELSEWHERE),
        ("NVIDIA Thor", (11, 0), ELSEWHERE),
        ("Tesla V100", (7, 0), ""),
    ],
)
def test_detect_refuses_an_unknown_gpu_and_says_what_to_do(
    gpu: Install, name: str, capability: tuple[int, int], remedy: str
) -> None:
    gpu(name, capability, 100)
    with pytest.raises(UnsupportedError, match=rf"GPU 3 \({name}\) is sm_\d+: .* for {KNOWN}") as error:
        arch.detect(3)
    assert "move the tensors to the CPU" in str(error.value)
    assert ("Blackwell" in str(error.value)) == bool(remedy) and remedy in str(error.value)


def test_has_gpu_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=answer: answer)
        assert arch.has_gpu() is answer
