"""From Q K^T to masked scores in the forward: softcap, ALiBi, bias, user mods, the band, dropout."""
