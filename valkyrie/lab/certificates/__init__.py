"""Memory, communication and time of a compiled step, read from its program."""
