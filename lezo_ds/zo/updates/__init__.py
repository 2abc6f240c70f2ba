"""Update rules: from the records of steps to what changes theta."""

from lezo_ds.zo.updates.base import StepUpdate, Term, Update, UpdateRule, updates_of_parameter
from lezo_ds.zo.updates.sgd import Sgd
from lezo_ds.zo.updates.weight_decay import SgdWeightDecay

__all__ = ["Sgd", "SgdWeightDecay", "StepUpdate", "Term", "Update", "UpdateRule", "updates_of_parameter"]
