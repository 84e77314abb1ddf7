"""The CPU path and the oracles."""
