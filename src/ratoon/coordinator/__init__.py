"""Who does what next: pure decisions on plain values. No torch, no clock, no I/O."""
