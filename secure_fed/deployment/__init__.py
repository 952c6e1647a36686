"""One federation on many machines, over any carrier of messages; `secure_fed.flower` is one.

charter       the terms of a run that all parties agree on: one file, signed by the coordinator
envelope      the bytes of one message, and its signature
messages      the kinds of messages, written into envelopes and read as if hostile
home          the folders of a node and of the coordinator: keys, settings, journal
policy        the federations that a node's owner admits
memberships   a node's federations, their place in its owner's ledger, and their end
problem       model and data, as one party has them
node          the answers of a node, and its refusals
agent, relay  the process that holds a node's secrets, and the socket to it
coordinator   founding a federation, reaching its members, conducting its rounds
"""
