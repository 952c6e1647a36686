"""Texts recovered from updates: gradient inversion of a model's first adapted layers.

prior_knowledge  the adversary's knowledge before an inversion: first layers, public texts, settings of the run
first_layer      the inputs that a model's first adapted layers read
factor_changes   the row spaces of the changes of a LoRA adapter's first factors
adamw_step       the gradient behind a step of AdamW
span             the exact test of DAGER: which inputs lie in such a row space
recovery         from updates to tokens: exact finds, guesses, or the reason why neither is possible
matching         recovery by optimisation, where the exact test does not apply
token_scores     the recall and precision of recovered tokens
"""
