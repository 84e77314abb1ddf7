"""Turns a problem into a plan: kernels, tiles, grids and workspace."""
