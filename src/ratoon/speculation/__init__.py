"""Speculative decoding that changes no token: draft trees, verification, strategies."""
