"""Audits of models trained elsewhere, by texts that were in the training and texts that were not.

subject    the model, with its adapter or without, and the texts
signals    a score for each text, as published attacks define it: higher means more likely a member
verdict    the conclusions from the scores, in the order in which a reader needs them
audit      the whole audit, as one JSON object
"""
