"""The run modes: train, evaluate, infer and precompile."""
