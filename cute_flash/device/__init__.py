"""Parts that kernels share. They work on the (m, n) view of an accumulator, on lengths, or on the order of blocks."""
