"""Attacks of a lying server: it chooses the tensors that clients start from, within the limits that a client accepts.

lies      the crafted tensors of a classifier's head, and what each shows
trials    trials of each attack, with the rate of a guess without any update
command   `secure-fed audit lying`
"""
