"""The cubin lock: digests of the machine code of the kernels listed in `tests.lock.cases`, recorded per toolchain.

    python -m tests.lock check [--jobs N] [--only PATTERN] [--against FILE]
    python -m tests.lock record FILE [--jobs N] [--only PATTERN]

A change of host code or names must not change any digest. A digest that changes on purpose
needs evidence from a GPU: correct results and a measured time. CONTRIBUTING.md has the steps. The output
marks kernels that spill registers, or whose wgmma ptxas serialises.

`record` also writes `sources.json`: digests of the sources of every kernel all of whose cases it compiled. While they
are the current ones, `make test` compiles a few kernels only (`tests.lock.sources`).
"""
