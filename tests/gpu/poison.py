"""Memory that torch hands out without a value is filled with what shows where a kernel did not write."""

import functools

import pytest
import torch

MAKERS = ("empty", "empty_like", "empty_strided")
GARBAGE = 1 << 20


def poisoned(make):
    @functools.wraps(make)
    def made(*args, **kwargs):
        x = make(*args, **kwargs)
        if x.is_cuda:
            with torch.no_grad():
                x.fill_(torch.nan if x.is_floating_point() else GARBAGE)
        return x

    return made


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Unlike torch's own way, without asking for deterministic algorithms."""
    for name in MAKERS:
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
