"""What the papers plot of a run beside its accuracy: measured where it is asked for, and no work where it is not.

angles       how far two sets of weights are apart, in length and in direction
compared     of which weights
similarity   centred kernel alignment of what two models make of the same examples
aggregation  what averaging loses of the clients' products
local        the three that look at each client's trained tensors, which no noise covers
watch        all that a configuration asks for, as a federation uses it
targets      rounds to a target accuracy, and time under a bandwidth: of the records alone
"""
