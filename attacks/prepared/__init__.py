"""Audits that are prepared before a training that happens elsewhere, with any tool.

coins      a fair coin for every candidate, sealed so that nobody can change it afterwards
planted    candidates that are made for the audit: wrong labels, and random secrets in sentences
making     the training file, the candidates, and the sealed truth, as a folder
folder     the folder, read and checked again
exposure   of planted secrets, members beside the others
audit      the trained model's scores of the candidates, and the lower bound on epsilon that follows
"""
