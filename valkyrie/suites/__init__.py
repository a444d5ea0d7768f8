"""Problems of any length for long contexts, generated from the rules of published benchmarks."""
