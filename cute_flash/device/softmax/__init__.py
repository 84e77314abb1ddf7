"""The online softmax of a block, and the pass that fuses the score transform with its exponentials."""
