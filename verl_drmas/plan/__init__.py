"""What a configuration needs of each GPU, without a GPU and without Ray."""
