"""Products of tensor cores: wgmma, the distribution of mma.sync over warps, fp32 by two fp16 pieces."""
