"""Flower as the transport of a federation on many machines: apps, messages, projects. The only importer of `flwr`."""
