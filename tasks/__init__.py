"""Tasks. The import of a module registers them, with seqio too if it is loaded."""
