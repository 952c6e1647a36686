"""Flower as the transport of a federation on many machines. The only importer of `flwr`.

carrier           envelopes as the content of Flower's messages, to nodes and back
coordinator_app   the ServerApp: a coordinator over Flower's Grid
node_app          the ClientApp: a relay to the node's agent
supernode         Flower's SuperNode, for a node's agent
project           a ready Flower project for a coordinator's federation, and its run
"""
