"""Contributions summed behind masks: the federation's side of `protocols`.

terms           parameters of a run's masked sums, computed by every party, and each client's own minima
plan            the public numbers that the encoding may depend on
encoding        contributions as integers modulo 2^k, and the decoding of their sum
expected_round  the round that a client expects; it refuses any other request
bound           binds the later passes of a round to its first
masked_client   the client's side of a masked sum
masked_sum      the server's side, from a cohort to the sum
session         its part with the protocol, stage by stage
plausible       refuses sums that no honest clients can have made
wiring          both sides of a simulated federation
"""
