"""The description of a call, before planning: arguments, score features, mask, dtypes, GPU, and their checks."""
