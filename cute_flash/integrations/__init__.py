"""Adapters of the public functions to the interfaces of other libraries. Each is imported on demand."""
