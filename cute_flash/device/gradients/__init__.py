"""From P to dS in the backward: gradients of scores, bias and user mods, and the sums of dQ."""
