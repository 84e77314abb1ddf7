"""The identity of a CUDA graph capture, from the driver."""

from __future__ import annotations


def capture_id(stream: int) -> int | None:
    """A number that identifies the capture in progress on a stream, given by its handle; None if it is unknown."""
    from cuda.bindings import driver  # type: ignore[import-untyped]

    error, _status, capture, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    return int(capture) if error == driver.CUresult.CUDA_SUCCESS else None
