"""Measurements of cute_flash beside its peers. Run from the repository: `python -m profiling --help`."""
