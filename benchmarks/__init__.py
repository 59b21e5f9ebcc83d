"""Measurements of autopar: each module prints its figures; `python -m benchmarks` runs them all."""
