"""Mathematics of training, on tensors: losses, advantages, reward shaping, controllers, evaluation metrics."""
