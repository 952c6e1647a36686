"""The kinds of prepared audits. The command line imports this module, so it has no heavy imports."""

KINDS = ("none", "labels", "secrets")  # kinds of candidates
TASKS = ("classification", "multi_label", "regression", "tokens", "question_answering", "causal_lm", "chat")
