"""Layer policies by name. To add one: a file with a subclass of `LayerPolicy`, and a line here."""

from lezo_ds.registry import Registry
from lezo_ds.zo.layers.adalezo import AdaLezo
from lezo_ds.zo.layers.base import LayerPolicy, LayerSample, num_dropped_from_sparsity
from lezo_ds.zo.layers.fixed import Fixed
from lezo_ds.zo.layers.uniform import Uniform
from lezo_ds.zo.layers.weighted import Weighted
from lezo_ds.zo.layers.window import Window

__all__ = ["LAYER_POLICIES", "LayerPolicy", "LayerSample", "num_dropped_from_sparsity"]

LAYER_POLICIES: Registry[type[LayerPolicy]] = Registry("layer policy", "zo.layer_policy")
LAYER_POLICIES.add("uniform", Uniform)
LAYER_POLICIES.add("window", Window)
LAYER_POLICIES.add("fixed", Fixed)
LAYER_POLICIES.add("weighted", Weighted)
LAYER_POLICIES.add("adalezo", AdaLezo)
