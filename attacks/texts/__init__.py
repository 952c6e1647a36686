"""Texts recovered from updates: gradient inversion of a model's first adapted layers.

factor_changes   the row spaces of the changes of a LoRA adapter's first factors
span             the exact test of DAGER: which inputs lie in such a row space, over all candidates for them
recovery         from updates to tokens and their scores: the adversary's prior knowledge, exact finds, guesses
"""
