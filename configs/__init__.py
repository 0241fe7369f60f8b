"""Hydra configs of verl-drmas. A package (`verl_drmas.configs`), so that Hydra finds them as `pkg://verl_drmas.configs`."""
