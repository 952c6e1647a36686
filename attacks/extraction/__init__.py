"""Texts that a language model gives back: canaries that were planted in its training, and texts of the training themselves.

template    canaries: a sentence with a random secret in it
likelihood  what a language model says of token sequences
exposure    how far a canary's own secret stands out from all that it could have had
similarity  how near a continuation comes to a text
prefix      continuations of the beginnings of texts, against the texts
personal    addresses and numbers of people in texts, by patterns
audit       texts that come back from a model, and from one that never saw them
"""
