"""The algorithm: keys, layer sampling, estimators and update rules. Pure Python; it imports no torch.

A step of every zeroth-order method has the same form (MeZO, LeZO, SPSA with n directions, FZOO, evolution
strategies):

1. `layers`: a policy drops some transformer blocks from the step.
2. `estimators`: an estimator chooses probes theta + scale * z(key), and turns their losses into one
   projected gradient for each direction.
3. `updates`: a rule maps the records of the steps so far to what is subtracted from theta.

Rank 0 asks the policy and the estimator, and broadcasts what they say; the other ranks obey. All state is
a function of the step records, so that a resumed run and a replay need nothing else.
"""
