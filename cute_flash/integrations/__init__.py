"""Adapters that give other libraries' names and signatures to the public functions. Each is imported on demand."""
