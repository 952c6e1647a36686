"""Audits prepared before a training elsewhere, with any tool.

coins      a fair coin for every candidate, sealed so that nobody can change it later
planted    candidates made for the audit: wrong labels, and random secrets in sentences
making     the training file, the candidates, and the sealed truth, as a folder
folder     reading and checking the folder
exposure   the exposure of planted secrets, members beside the others
audit      the trained model's scores of the candidates, and the resulting lower bound on epsilon
"""
