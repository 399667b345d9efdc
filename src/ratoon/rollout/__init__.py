"""Generating responses: the engine, and the adapters to other engines."""
