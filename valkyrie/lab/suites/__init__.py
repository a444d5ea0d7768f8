"""Long contexts: problems after published benchmarks, and the run mode that asks a model."""
