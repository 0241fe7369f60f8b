"""verl without a GPU: platform, FSDP2 engine, process-group start and vLLM extension. Chosen by VERL_PLATFORM=cpu."""
