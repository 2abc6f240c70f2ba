"""The configuration of a run. It imports nothing heavy, so that a wrong key is refused at once."""

from lezo_ds.config.reading import flatten
from lezo_ds.config.run_config import (
    check_world,
    config_from_dict,
    config_to_dict,
    copies_per_pass,
    eval_every,
    find_task,
    load_config,
    make_estimator,
    make_law,
    make_layer_policy,
    make_schedule,
    may_differ_on_resume,
    num_passes,
)
from lezo_ds.config.schema import (
    TRAINED,
    ZEROTH_ORDER,
    DataConfig,
    Dtype,
    Method,
    PeftConfig,
    RunConfig,
    ZoConfig,
)
from lezo_ds.config.yaml_text import dump_yaml, load_yaml
