"""An adversary's knowledge of training steps: changes of the global state, updates and sums, and the gradients beside them.

steps          the steps of every round, as far as an adversary sees them
alignment      the cosine between a step and the gradient of an example
released       what was released in each round, as vectors in the coordinates of a client's update
rounding_grid  the factor that an update was scaled by, read off the rounding of float32
"""
