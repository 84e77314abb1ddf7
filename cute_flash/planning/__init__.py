"""From a problem to a plan: kernels, tile rows, grids and workspace."""
