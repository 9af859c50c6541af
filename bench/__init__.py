"""Benchmarks that ship: they measure chapbook on the user's own model and machine, as ratios within one run."""
