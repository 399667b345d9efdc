"""Training of the policy: packed micro-batches, float32 master weights, several workers."""
