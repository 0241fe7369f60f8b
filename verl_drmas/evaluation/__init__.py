"""Teams against served models: sessions over OpenAI-compatible endpoints, without Ray or verl."""
