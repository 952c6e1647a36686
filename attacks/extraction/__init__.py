"""Texts that a language model reproduces: canaries planted in its training, and the training texts themselves.

prefix     continuations of the beginnings of texts, compared with the texts, beside reference models
exposure   canaries with a random secret, and how far a secret stands out among all possible ones
command    `secure-fed audit extract`
"""
