"""Properties of the training data: an attribute of a known record, and the share of an attribute in a client's data.

attribute   the value of an attribute that a model finds most likely in a record, beside guesses without a model
share       the share of an attribute in a client's data, from its update, beside a guess without the update
audit       training records compared with records of the same kind outside the training
"""
