"""Diagnostics that the papers plot beside accuracy (`evaluation.diagnostics`). They cost nothing unless requested.

angles       the distance of two sets of weights, in length and in direction
compared     the weights that are compared
similarity   centred kernel alignment of two models' features of the same examples
aggregation  the error of averaging the factors of clients' products
local        three diagnostics of each client's trained tensors, which no noise covers
watch        all diagnostics of a run
targets      rounds to a target accuracy, and time under a bandwidth, from records alone
"""
