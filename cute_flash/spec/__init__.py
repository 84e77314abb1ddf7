"""A call described: its arguments, problem, features, mask, dtypes and GPU."""
