"""Attacks of a lying server: it chooses the tensors that clients start from, within the limits that a client accepts.

head          the hidden layer of a classifier's head, which travels with every adapter
traps         units that isolate single examples of a batch
membership    a unit that fires for one text alone
suppression   a sum of many clients in which only one contributes
replay        local training repeated with a text and without it
labels        the counts of labels, from a step of AdamW or SGD
table         the federation and the texts of the trials
trials        trials of each attack, with the rate of a guess without any update
command       `secure-fed audit --lying`
"""
