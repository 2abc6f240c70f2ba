"""The configuration of a run: its keys, and strict reading of recipes, overrides and recorded runs.

It imports nothing heavy, so that a wrong key is refused at once.
"""

from lezo_ds.config.components import (
    copies_per_pass,
    find_task,
    make_estimator,
    make_layer_policy,
    make_schedule,
    may_differ_on_resume,
    num_passes,
)
from lezo_ds.config.reading import flatten, load_yaml
from lezo_ds.config.run_config import check_world, config_from_dict, config_to_dict, load_config
from lezo_ds.config.schema import (
    RESUME_MAY_DIFFER,
    TRAINED,
    ZEROTH_ORDER,
    AdamWConfig,
    DataConfig,
    Dtype,
    GenerationConfig,
    Method,
    ModelConfig,
    PeftConfig,
    PeftKind,
    RunConfig,
    ZoConfig,
)
