"""Train language models with compute that is already paid for."""
