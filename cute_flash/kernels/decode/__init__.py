"""The decode kernel, for all architectures."""
