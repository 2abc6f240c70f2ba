"""The algorithm: keys, layer policies, estimators and updates. Pure Python; it imports no torch.

A step of every zeroth-order method has the same form (MeZO, LeZO, SPSA with n directions, FZOO, evolution
strategies). A policy drops transformer blocks. An estimator chooses probes theta + scale * z(key), and turns
their losses into one projected gradient for each direction. An update subtracts the directions from theta.
All state is a function of the step records, so a resumed run and a replay need nothing else.
"""

from lezo_ds.zo import adalezo, one_sided  # noqa: F401 (they register components)
