"""Tiles and fragments between global memory, shared memory and registers."""
