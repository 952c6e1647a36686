"""Protocols by which a server learns a sum and nothing else. None yet: sums are plain for now."""
