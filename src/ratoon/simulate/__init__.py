"""Rollouts on a simulated clock: the real coordinator, planner and tuner, invented machines."""
