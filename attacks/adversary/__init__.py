"""The input of an attack: the audited run, the part of it that an adversary sees, and reference adapters.

case           the audited run, four adversaries by the part of it that each sees, an attack's input and its finding
steps          training steps in an adversary's view, gradients to compare them with, and releases as vectors
shadows        reference adapters: the same federated training with other members; nothing is released or charged
null           the distribution of a non-member's score, where it is known in closed form or by draws
lying_server   a server that chooses the tensors that clients start a round from
"""
