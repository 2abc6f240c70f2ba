"""Estimators by name. To add one: a file with a subclass of `Estimator`, and a line here."""

from lezo_ds.registry import Registry
from lezo_ds.zo.estimators.base import Estimate, Estimator, Probe, mean_losses
from lezo_ds.zo.estimators.evolution import EvolutionStrategies
from lezo_ds.zo.estimators.fzoo import Fzoo
from lezo_ds.zo.estimators.one_sided import OneSided
from lezo_ds.zo.estimators.spsa import Spsa

__all__ = ["ESTIMATORS", "Estimate", "Estimator", "Probe", "mean_losses"]

ESTIMATORS: Registry[type[Estimator]] = Registry("estimator", "zo.estimator")
ESTIMATORS.add("spsa", Spsa)
ESTIMATORS.add("one-sided", OneSided)
ESTIMATORS.add("fzoo", Fzoo)
ESTIMATORS.add("evolution-strategies", EvolutionStrategies)
