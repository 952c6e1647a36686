"""Properties of the training data: an attribute of a known record, and the share of an attribute in a client's data.

attribute   the value of an attribute that a model finds most likely in a record, beside guesses without a model
share       the share of a client's texts that contain a word, guessed from its update, beside a guess without the update
command     `secure-fed audit model --attribute` and `secure-fed audit share`
"""
