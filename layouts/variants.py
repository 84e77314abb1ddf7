"""Names of the shared-memory layouts that a kernel can be built with; the first one is the default."""

# What mma.sync kernels can work with: ldmatrix takes any 16 aligned bytes for a row.
VARIANTS = ("swizzled", "padded", "plain")
# What TMA and wgmma can work with.
HOPPER_VARIANTS = ("swizzled", "swizzled64", "swizzled32", "interleaved")
