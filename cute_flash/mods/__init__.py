"""Functions that users write: traced once into a graph, differentiated, and computed by whatever computes."""
