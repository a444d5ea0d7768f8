"""A train step compared with itself in other forms and numbers."""
