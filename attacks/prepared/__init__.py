"""Audits prepared before a training elsewhere, with any tool.

folder     coins for every candidate, planted candidates, the training file and the sealed truth; reading and checking them
findings   the scores of the candidates, the lower bound on epsilon, and the exposure of planted secrets
command    `secure-fed audit prepare`, and `audit prepared`
"""
