"""Studies of models and of compiled programs. Training does not need them."""
