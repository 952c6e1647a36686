"""Texts that a language model gives back: canaries that were planted in its training, and texts of the training themselves.

template    canaries: a sentence with a random secret in it
"""
