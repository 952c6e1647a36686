"""Private training loops of the user's own: the implementation of `secure_fed.private`.

account     the budget, the steps and noise that follow from it, the charges, and the guarantee in words
rehearsal   a trial of the loop before each epoch: whether an example's gradient depends on that example alone
batches     the loader: batches of a rehearsal, then Poisson samples by secret coins
steps       per-example gradients, and the noised step in the loop's own optimizer
"""
