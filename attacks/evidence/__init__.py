"""From scores to a verdict: what an attack's scores show about membership and epsilon.

figures    the figures of one finding, from its scores and the coins; estimates of epsilon; the units that stand out
bounds     lower bounds on epsilon
tradeoff   the AUC and the rates that a guarantee allows, and the bound expected from the best possible attack
baseline   how well texts alone predict membership, without a model
attempts   the results of an attack on texts, and when they are a leak
verdict    which findings are significant, which of these the guarantee covers, and the level that follows; the main attack
"""
