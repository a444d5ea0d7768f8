"""Losses, gradients through chunks, optimizers, and the compiled train step."""
