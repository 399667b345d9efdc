"""Decoder, its Hugging Face files, tokenizer, KV cache and packing."""
