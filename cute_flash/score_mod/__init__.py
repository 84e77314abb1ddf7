"""User mods (score_mod, mask_mod, score_mod_bwd): tracing, derivatives, evaluation, lowering; and block masks."""
