"""Joins workflows to verl's V1 agent loop: one activation is one row, with the tokens and log-probs as sampled."""
