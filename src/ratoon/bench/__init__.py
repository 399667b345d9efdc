"""Benchmarks: interleaved rounds, a baseline in the same run, intervals instead of best cases."""
