"""Contributions summed behind masks: the federation's side of `protocols`.

terms     parameters of a run's masked sums, computed by every party, and each client's own minima
encoding  contributions as integers modulo 2^k, and the decoding of their sum
client    the client's side of a masked sum
server    the server's side, from a cohort to the sum, through the stages of the protocol
checks    the requests, passes and sums that client and server refuse
wiring    both sides put together, and the transport of a simulation
"""
