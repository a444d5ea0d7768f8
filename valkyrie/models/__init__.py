"""Haiku modules, and the functions of arrays below them; a wrong option is a ConfigurationError."""
