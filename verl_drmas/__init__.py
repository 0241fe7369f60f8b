"""Train teams of language-model agents with stock verl (Dr. MAS, M-GRPO)."""

__version__ = "0.1.0"
