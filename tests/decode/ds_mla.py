"""Rows of `fp8_ds_mla` number by number, independent of `cute_flash.reference`: bytes from fp32 rows, and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LATENT, ROTARY, ROW_BYTES = 512, 64, 656
# The magnitudes of e4m3 by their bits 0 ... 126. Bits 127 are NaN.
MAGNITUDES = np.array(
    [(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
)
MIDDLES = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
SMALLEST = np.float32(2.0**-126)


def _bits(x: np.ndarray) -> np.ndarray:
    """The e4m3 bits of fp32 numbers: the nearest, of two the even one; saturated."""
    size = np.abs(x.astype(np.float64))
    index = np.searchsorted(MIDDLES, size, side="left")  # the first number whose upper neighbour is not nearer
    is_tie = (index < len(MIDDLES)) & (size == MIDDLES[np.minimum(index, len(MIDDLES) - 1)])
    index = np.where(is_tie & (index % 2 == 1), index + 1, index)
    return np.where(np.isnan(x), 127, index).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)


def packed(rows: Tensor) -> Tensor:
    """Rows (..., 576) as bytes (..., 656)."""
    leading, flat = rows.shape[:-1], rows.detach().cpu().float().reshape(-1, LATENT + ROTARY)
    bytes_of_rows = np.zeros((len(flat), ROW_BYTES), np.uint8)
    for row, numbers in zip(bytes_of_rows, flat.numpy(), strict=True):
        for group in range(4):
            columns = slice(128 * group, 128 * group + 128)
            known = np.abs(numbers[columns])[~np.isnan(numbers[columns])]
            with np.errstate(invalid="ignore"):
                scale = np.maximum(np.float32(max(known, default=0)) / np.float32(448), SMALLEST)
                row[columns] = _bits(numbers[columns] / scale)
            row[512 + 4 * group : 516 + 4 * group] = np.frombuffer(scale.tobytes(), np.uint8)
    result = torch.from_numpy(bytes_of_rows)
    result[:, 528:] = flat[:, LATENT:].bfloat16().view(torch.uint8)
    return result.reshape(*leading, ROW_BYTES).to(rows.device)


def unpacked(rows: Tensor) -> Tensor:
    """Bytes (..., 656) as rows (..., 576) in fp64."""
    leading, flat = rows.shape[:-1], rows.detach().cpu().reshape(-1, ROW_BYTES)
    codes = flat[:, :LATENT].numpy()
    numbers = np.append(MAGNITUDES, np.nan)[codes & 127] * np.where(codes & 128, -1.0, 1.0)
    scales = np.frombuffer(flat[:, 512:528].numpy().tobytes(), np.float32).reshape(-1, 4).astype(np.float64)
    latent = torch.from_numpy(numbers * scales.repeat(128, axis=1))
    rotary = flat[:, 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat((latent, rotary), dim=-1).reshape(*leading, LATENT + ROTARY).to(rows.device)
