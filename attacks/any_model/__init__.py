"""Audits of models that others have trained, by texts that were in the training and texts that were not.

subject    the model, with its adapter or without, and the texts
signals    a number for each text, as published attacks define it: higher speaks for membership
verdict    what the numbers show, said in order of what has to be known first
audit      all of it, as one JSON object
"""
