"""Command line, demo, doctor and explanations."""
