"""The client of OpenAI-compatible servers that evaluation, judges and tools share; neither Ray nor verl."""
