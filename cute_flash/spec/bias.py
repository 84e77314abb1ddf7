"""`BiasLayout`: the shape, the strides and the alignment of a bias, which decide how kernels load it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Dtypes of a bias that kernels read; others are converted to fp32.
BIAS_DTYPES = ("float16", "bfloat16", "float32")
# The largest row stride of a bias: kernels hold it in 32 bits.
MAX_BIAS_ROW_BYTES = (1 << 31) - 1
# Tensors whose address can be read. Fake tensors and other subclasses count as aligned.
_WITH_ADDRESS = (Tensor, torch.nn.Parameter)


def bias_operand(bias: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """The bias as (B, H, Sq, Sk), with strides of 0 where it broadcasts, in a dtype that kernels read."""
    if _is_copied(bias):
        bias = (bias.float() if bias.element_size() > 4 else bias).contiguous()
    return bias if bias.shape == sizes else bias.expand(sizes)


def _is_copied(bias: Tensor) -> bool:
    """Whether kernels cannot read the bias in place."""
    return bias.element_size() > 4 or bias.stride(2) * bias.element_size() > MAX_BIAS_ROW_BYTES


class BiasLayout(NamedTuple):
    """A bias as kernels read it."""

    shape: tuple[int, ...]  # before broadcasting
    stride: tuple[int, ...]  # of (B, H, Sq, Sk), 0 where the bias broadcasts
    dtype: str
    grad_dtype: str  # in which kernels may store its gradient
    address: int  # modulo 16
    num_keys: int

    @staticmethod
    def of(bias: Tensor, sizes: tuple[int, int, int, int]) -> BiasLayout:
        # A copy has the strides of a contiguous tensor, and is aligned. A meta tensor has them without the copy.
        is_copied = _is_copied(bias)
        operand = bias_operand(torch.empty_like(bias, device="meta") if is_copied else bias, sizes)
        dtype = str(bias.dtype).removeprefix("torch.")
        return BiasLayout(
            shape=tuple(bias.shape),
            stride=tuple(operand.stride()),
            dtype=str(operand.dtype).removeprefix("torch."),
            grad_dtype=dtype if dtype in BIAS_DTYPES else "float32",
            address=0 if is_copied or type(bias) not in _WITH_ADDRESS else operand.data_ptr() % 16,
            num_keys=operand.shape[3],
        )

    @property
    def element_size(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def has_paired_loads(self) -> bool:
        """Whether the bias of two neighbouring keys is one aligned load."""
        *strides, last = self.stride
        is_even = not any(x % 2 for x in (*strides, self.num_keys))
        return last == 1 and is_even and self.address % (2 * self.element_size) == 0

    @property
    def fits_tma(self) -> bool:
        """Whether TMA can load tiles: 16-bit elements, and distinct rows that start at multiples of 16 bytes."""
        *strides, last = self.stride
        is_aligned = not any(x % 8 for x in strides) and self.address == 0
        return self.element_size == 2 and last == 1 and strides[2] > 0 and is_aligned

    @property
    def varies_by_row(self) -> bool:
        return self.stride[2] != 0
