"""Contributions summed behind masks: the federation's side of `protocols`.

terms    what every party works out from the run's configuration: parameters, and each client's own minima
plan     the public numbers that their encoding may depend on
words    contributions as integers modulo 2^k, and sums of them back
member   a client in a masked sum
sum      the server's side, one pass from the first key to the sum
"""
