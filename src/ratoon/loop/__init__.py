"""The loops: one rollout, one RL step, a whole run. Read `rl_step.py` first."""
