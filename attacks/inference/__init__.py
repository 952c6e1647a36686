"""Properties of the training data: an attribute of a known record, and the share of an attribute in a client's data.

attribute   which value of an attribute a model finds most likely in a record, beside guesses that need no model
share       the share of an attribute in a client's data by its update, beside the guess that needs no update
audit       records of the training, against records of the same kind that were not in it
"""
