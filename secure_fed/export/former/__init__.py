"""Modules under the names that older exports and scripts import, with a DeprecationWarning; the next version removes them.

This folder is on the path of `secure_fed` itself, so that its `trained.py` is imported as `secure_fed.trained`.
"""
