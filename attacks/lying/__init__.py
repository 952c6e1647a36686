"""Attacks of a server that lies: it chooses the tensors that clients start from, within what a client accepts.

head          the hidden layer of a classifier's head, which travels with every adapter
traps         units that isolate single examples of a batch
membership    a unit that fires for one text alone
suppression   a sum of many clients in which only one contributes
replay        local training repeated with a text and without it
labels        the counts of labels out of a step of AdamW or SGD
table         the federation and the texts that they are tried on
trials        each of them tried, with the guess that needs nothing
command       `secure-fed audit --lying`
"""
