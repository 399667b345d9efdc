"""Drafters trained and measured on recorded responses; nothing is decoded speculatively."""
