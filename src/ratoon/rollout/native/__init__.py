"""Ratoon's own rollout engine."""
