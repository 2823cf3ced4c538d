"""Optimizers and the rules that scale a recipe."""
