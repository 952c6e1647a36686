"""Differential privacy: sampling, clipping, noise, accounting, and the ledger of a data set's budget.

Knows nothing of models, methods or transports.
"""
