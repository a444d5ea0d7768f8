"""The S5 state-space layer."""
