"""The planner: a hierarchical reasoning model over intervals of tokens."""
