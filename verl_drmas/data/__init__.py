"""Builds and checks the prompt files that training and validation read."""
