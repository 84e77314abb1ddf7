"""The description of a call: arguments, problem, features, mask, dtypes and GPU."""
