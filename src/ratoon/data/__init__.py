"""Prompts and examples: from files, from reasoning-gym, or generated."""
