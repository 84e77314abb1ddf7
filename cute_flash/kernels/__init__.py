"""The kernels: a folder for each family (sm80, sm90), and `common` for code of both."""
