"""Many runs as one: cells of a benchmark, and what they add up to."""
