"""Privacy: how a cohort is drawn, and what happens to a contribution and to a sum before anybody may use them.

Knows nothing of models, methods or transports.
"""
