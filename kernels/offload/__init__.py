"""Training with weights, optimizer state and boundary activations in host memory: layer after layer."""
