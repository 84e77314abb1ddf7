"""One file per kernel."""
