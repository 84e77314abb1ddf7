"""Device code that the kernels share: softmax, masks, score features, copies, pipelines and tile schedulers."""
