"""The command line: demo, doctor, explain, tiles, loops, inspect, precompile and cache."""
