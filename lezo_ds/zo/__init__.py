"""The algorithm: keys, laws, layer policies, estimators and updates. Pure Python, without torch.

A step has the same form in every zeroth-order method (MeZO, LeZO, SPSA with n directions, FZOO,
evolution strategies):

    records of all steps so far
      -> LayerPolicy.sample        which transformer blocks the step drops          layers.py
      -> Estimator.probes          at which theta + scale * z(key) to measure       estimators.py
      -> Step.passes               which probes of which micro-batch run at once    step.py
      -> (forward passes)          the loss at each probe
      -> Estimator.estimate        one projected gradient for each direction
      -> StepRecord                the line of the journal                          records.py
      -> updates_of_parameter      what is subtracted from each parameter           updates.py

`laws` says what z is, and `keys` derives every key from the run's seed. All state is a function of
the step records, so a resumed run and a replay need nothing else.
"""
