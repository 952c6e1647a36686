"""The input of an attack: the audited run, the part of it that an adversary sees, and reference adapters.

target      the run that is audited: its federation as it was before training, and the state it ended with
vantage     four adversaries, by what each sees of a run
case        one adversary and one run, as an attack gets them; and the finding that an attack returns
shadows     reference adapters: the federated procedure once more, over other members
reference   one such reference federation, which releases nothing and charges nothing
null        the distribution of a score of a unit that did not train, where it is known in closed form or by draws
"""
