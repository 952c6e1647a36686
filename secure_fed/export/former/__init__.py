"""Modules under the names that older exports and scripts import, with a DeprecationWarning; gone with the next version.

This folder is on the path of `secure_fed` itself, so that its `trained.py` is imported as `secure_fed.trained`.
"""
