"""Update rules by name. To add one: a file with a subclass of `UpdateRule`, and a line here."""

from lezo_ds.registry import Registry
from lezo_ds.zo.updates.base import StepUpdate, Term, Update, UpdateRule, updates_of_parameter
from lezo_ds.zo.updates.momentum import SgdMomentum
from lezo_ds.zo.updates.sgd import Sgd
from lezo_ds.zo.updates.weight_decay import SgdWeightDecay

__all__ = ["UPDATE_RULES", "StepUpdate", "Term", "Update", "UpdateRule", "updates_of_parameter"]

UPDATE_RULES: Registry[type[UpdateRule]] = Registry("update rule", "zo.update_rule")
UPDATE_RULES.add("sgd", Sgd)
UPDATE_RULES.add("sgd-weight-decay", SgdWeightDecay)
UPDATE_RULES.add("sgd-momentum", SgdMomentum)
