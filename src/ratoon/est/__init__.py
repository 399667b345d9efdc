"""Evolving subnetwork training: subnetworks, how they are drawn, when they grow, what they cost."""
