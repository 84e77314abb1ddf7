"""The command line: demo, doctor, explain, inspect and precompile."""
