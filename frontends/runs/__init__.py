"""Training runs: recorded step by step, read again, replayed, repeated without some of their data."""
