"""Mutants: wrong versions of single lines, and the tests that must fail for each.

    python -m tests.mutants [--only PATTERN] [--jobs N]

Each mutant is applied to a copy of the working tree, never to the tree itself, and its tests run there until the first
failure. A mutant that survives is a missing test. `test_mutants.py`, a part of `make test`, checks that the text of
every mutant still occurs exactly once.
"""
