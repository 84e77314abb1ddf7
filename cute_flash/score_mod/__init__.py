"""User score_mod and mask_mod functions: tracing, derivatives, evaluation, lowering; block masks."""
