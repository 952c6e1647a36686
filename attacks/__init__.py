"""Attacks that measure what a recording of a run gives away. None yet."""
