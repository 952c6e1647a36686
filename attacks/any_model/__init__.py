"""Audits of models trained elsewhere, by texts that were in the training and texts that were not.

subject   the model, with its adapter or without, and the texts
outputs   the model's head, its classes and the scale of its labels, which are never guessed
signals   a score for each text, as published attacks define it: higher means more likely a member
shadows   models trained on random halves of the texts, for LiRA and RMIA
report    the whole audit: figures, verdict, page
command   `secure-fed audit model`
"""
