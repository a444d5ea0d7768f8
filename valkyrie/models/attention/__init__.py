"""Window attention, causal and bidirectional, with global tokens."""
