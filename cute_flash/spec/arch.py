"""GPU architectures: the limits that bound a tile, and the rates that bound its speed.

Rates are datasheet values of one common GPU per architecture. `detect()` reads the number of SMs and the size of L2
from the driver, and looks up the bandwidth by the name of the GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache

from cute_flash.errors import UnsupportedError

KIB = 1024


@dataclass(frozen=True)
class ArchSpec:
    """Limits and rates of a GPU architecture."""

    name: str  # as the compiler spells it: "sm_80"
    gpu: str  # name of the GPU with the rates below
    smem_per_cta: int  # bytes of shared memory that a CTA can allocate
    smem_per_sm: int  # bytes
    registers_per_sm: int  # of 32 bits
    max_threads_per_sm: int
    num_sms: int
    l2_bytes: int
    tensor_tflops: float  # dense fp16/bf16 with fp32 accumulation
    hbm_tbps: float
    clock_ghz: float
    exp2_per_clock: int  # MUFU results per SM and clock
    was_run: bool = True  # False: kernels are compiled for the architecture, but have not been run on it

    @property
    def capability(self) -> tuple[int, int]:
        digits = self.name.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])

    @property
    def has_wgmma(self) -> bool:
        """Whether the architecture has wgmma, which only Hopper has."""
        return self.capability == (9, 0)

    @property
    def target(self) -> str:
        """The architecture as the compiler names it: from sm_120 on with a suffix."""
        return self.name + "a" * (self.capability >= (12, 0))

    @property
    def ridge(self) -> float:
        """FLOP per byte at which the tensor cores and the memory take the same time."""
        return self.tensor_tflops / self.hbm_tbps


SM_80 = ArchSpec("sm_80", "A100", 163 * KIB, 164 * KIB, 65536, 2048, 108, 40 << 20, 312.0, 2.0, 1.41, 16)
SM_86 = ArchSpec("sm_86", "A10", 99 * KIB, 100 * KIB, 65536, 1536, 72, 6 << 20, 125.0, 0.6, 1.70, 16)
SM_89 = ArchSpec("sm_89", "L40S", 99 * KIB, 100 * KIB, 65536, 1536, 142, 96 << 20, 362.0, 0.864, 2.52, 16)
SM_90 = ArchSpec("sm_90", "H100", 227 * KIB, 228 * KIB, 65536, 2048, 132, 50 << 20, 989.0, 3.35, 1.83, 16)
SM_120 = ArchSpec(
    "sm_120", "RTX 5090", 99 * KIB, 100 * KIB, 65536, 1536, 170, 96 << 20, 209.5, 1.792, 2.41, 16, was_run=False
)
# GB10's datasheet has only a rate of FP4: bf16 has a quarter of it without sparsity, as on the RTX PRO 6000.
SM_121 = ArchSpec(
    "sm_121", "GB10", 99 * KIB, 100 * KIB, 65536, 1536, 48, 24 << 20, 125.0, 0.273, 2.52, 16, was_run=False
)
ARCHS = {spec.name: spec for spec in (SM_80, SM_86, SM_89, SM_90, SM_120, SM_121)}

H200 = replace(SM_90, gpu="H200", hbm_tbps=4.8)
RTX_PRO_6000 = replace(SM_120, gpu="RTX PRO 6000", num_sms=188, l2_bytes=128 << 20, tensor_tflops=503.8, clock_ghz=2.62)
GPUS = {spec.gpu: spec for spec in (*ARCHS.values(), H200, RTX_PRO_6000)}

# Memory bandwidth by a part of the GPU's name, for GPUs that differ from `GPUS`: the driver does not report it. The
# first match is used.
_HBM_TBPS = {
    "GH200": 4.0,
    "H100 PCIe": 2.0,
    "A100-PCIE-40GB": 1.555,
    "A100-SXM4-40GB": 1.555,
    "RTX PRO 6000 Blackwell Server": 1.597,
    "RTX 5080": 0.96,
    "RTX 5070 Ti": 0.896,
    "RTX 5070": 0.672,
    "RTX 5060": 0.448,
}
# Architectures and GPUs whose tensor cores have instructions (tcgen05) that no kernel here uses.
_DATA_CENTRE_BLACKWELL = {"sm_100", "sm_101", "sm_103", "sm_110", "B200", "B300", "GB200", "GB300"}


def by_name(name: str) -> ArchSpec:
    """The spec for "sm_80", "sm80", "80", "sm_90a", or for a GPU: "A100", "h200", "RTX 5090", "rtx5090"."""
    digits = name.lower().removeprefix("sm").removeprefix("_").rstrip("a")
    gpus = {gpu.replace(" ", ""): spec for gpu, spec in GPUS.items()}
    spec = ARCHS.get(f"sm_{digits}") or gpus.get(name.upper().replace(" ", ""))
    if spec is None:
        others = _other_libraries(f"sm_{digits}", name.upper())
        raise UnsupportedError(f"architecture {name!r}: use one of {', '.join(ARCHS)}, {', '.join(GPUS)}{others}")
    return spec


def _other_libraries(*names: str) -> str:
    """The end of an error message: what to use, if an architecture or a GPU is data-centre Blackwell."""
    if not _DATA_CENTRE_BLACKWELL & set(names):
        return ""
    return "; on data-centre Blackwell, use torch's SDPA with cuDNN, or FlashAttention-4"


def override() -> ArchSpec | None:
    """The architecture that `CUTE_FLASH_ARCH` names, to compile for a GPU that is not present; None if it is unset."""
    name = os.environ.get("CUTE_FLASH_ARCH")
    return by_name(name) if name else None


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@cache
def detect(device_index: int) -> ArchSpec:
    """The architecture of one CUDA device."""
    import torch

    properties = torch.cuda.get_device_properties(device_index)
    name = f"sm_{properties.major}{properties.minor}"
    if name not in ARCHS:
        raise UnsupportedError(
            f"GPU {device_index} ({properties.name}) is {name}: kernels exist for {', '.join(ARCHS)}"
            f"{_other_libraries(name)}; move the tensors to the CPU for the reference path"
        )
    known = (spec for spec in GPUS.values() if spec.name == name and spec.gpu in properties.name)
    spec = next(known, ARCHS[name])
    return replace(
        spec,
        gpu=properties.name,
        num_sms=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", spec.l2_bytes),
        hbm_tbps=next((v for k, v in _HBM_TBPS.items() if k in properties.name), spec.hbm_tbps),
    )
