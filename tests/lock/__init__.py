"""The cubin lock: digests of the machine code of every kernel that matters, recorded per toolchain.

    python -m tests.lock check [--jobs N] [--only PATTERN] [--against FILE]
    python -m tests.lock record FILE [--jobs N] [--only PATTERN]

A change of the host code or of names must leave all digests as they are. A digest that changes on purpose
needs evidence from a GPU: correct results and a measured time. CONTRIBUTING.md has the steps. Lines of
kernels that spill registers, or whose wgmma ptxas serialises, say so.
"""
