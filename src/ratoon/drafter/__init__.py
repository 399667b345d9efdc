"""The learned drafter and what trains it."""
