"""The input of an attack: the audited run, the part of it that an adversary sees, and reference adapters.

target      the audited run: its federation before training, and its final state
vantage     four adversaries, by the part of a run that each sees
case        an attack's input (one adversary and one run) and its result (a finding)
shadows     reference adapters: the same federated training with other members
reference   one such reference federation, which releases nothing and charges nothing
null        the distribution of a non-member's score, where it is known in closed form or by draws
"""
