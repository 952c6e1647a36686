"""Texts that a language model reproduces: canaries planted in its training, and the training texts themselves.

template        canaries: a sentence with a random secret in it, or a question and an answer
likelihood      a language model's log-likelihoods of token sequences
exposure        how far a canary's secret stands out among all possible secrets
similarity      how close a continuation is to a text
prefix          continuations of the beginnings of texts, compared with the texts
conversations   the same for conversations, whose template does not count
personal        addresses and numbers of people in texts, by patterns
audit           texts that a model reproduces, and texts that reference models reproduce
"""
