"""Scoring of what agents wrote: no Ray, no verl, so that a reward can be tested in milliseconds.

All of it is pure but for `judge_endpoint.py`, which asks a model.
"""

from verl_drmas.rewards.math import MathScore, extract_boxed, math_score, math_score_async

__all__ = ["MathScore", "extract_boxed", "math_score", "math_score_async"]
