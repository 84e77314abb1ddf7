"""Launches of a plan on torch tensors."""
