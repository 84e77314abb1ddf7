"""torch's own ring attention calls the SDPA operators with the kernels of cute_flash, here on CPU tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import processes

pytestmark = pytest.mark.processes
pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention", exc_type=ImportError)


def torch_ring_attention() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    from torch.library import Library

    import cute_flash
    import cute_flash.distributed as cp
    from cute_flash.integrations.sdpa_kernels import KERNELS

    library = Library("aten", "IMPL", "CPU")
    for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"):
        library.impl(name, KERNELS[name])
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 4, 64, 8, generator=generator) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = cute_flash.attn(*leaves, causal=True)
    grads = torch.autograd.grad(expected, leaves, dout)

    def shard(x: torch.Tensor) -> torch.Tensor:
        # The order of torch's load balancer is that of zigzag.
        return cp.shard(x, group=mesh, dim=2)

    local = [shard(x) for x in (q, k, v)]
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _mask = ring._scaled_dot_product_ring_flash_attention(
        mesh, *local, is_causal=True
    )
    torch.testing.assert_close(out, shard(expected.detach()), rtol=1e-5, atol=1e-5)
    found = ring._scaled_dot_product_ring_flash_attention_backward(
        mesh, shard(dout), *local, out, lse, cu_q, cu_k, max_q, max_k, 0.0, True, seed, offset
    )
    for x, y in zip(found, grads):
        torch.testing.assert_close(x, shard(y), rtol=1e-5, atol=2e-5)


def test_torch_calls_the_kernels_for_each_hop(tmp_path: Path) -> None:
    (ranks,) = processes.run(2, [torch_ring_attention], tmp_path)
    for error, _ in ranks.values():
        assert error is None, error
    assert len(ranks) == 2
