"""A dumped step's advantages, computed again: by its own estimator, or by others on the same rows."""
