"""Policy-gradient mathematics: advantages, losses, divergences, reductions; and rewards."""
