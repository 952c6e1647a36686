"""Properties of the training data: an attribute of a known record.

attribute   which value of an attribute a model finds most likely in a record, beside guesses that need no model
audit       records of the training, against records of the same kind that were not in it
"""
