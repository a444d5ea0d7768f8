"""From a model to a train step: losses, truncated back-propagation, optimizer, curriculum."""
