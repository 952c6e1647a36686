"""An adversary's knowledge of training steps: changes of the global state, updates and sums, and gradients to compare with.

steps          the steps of every round in an adversary's view
alignment      the cosine between a step and the gradient of an example
turns          the rounds that are informative about a unit, under a public order
released       the releases of each round, as vectors in the coordinates of a client's update
rounding_grid  the factor by which an update was scaled, from the rounding of float32
"""
