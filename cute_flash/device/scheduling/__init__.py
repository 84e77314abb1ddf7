"""Which tiles and blocks a CTA computes, in which order, and what its warps wait for."""
