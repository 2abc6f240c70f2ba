"""The configuration of a run: what its recipe and its command line ask for.

    yaml_text     YAML 1.2, without trust
    schema        every key, with its type, limits, default, help, properties and checks
    names         what an unknown key means
    paths         what a path in a recipe is relative to
    load          from a recipe and overrides to a RunConfig, and the help of the keys
    components    what the values stand for: estimator, layer policy, numbers of passes
    deepspeed     the DeepSpeed JSON (imports DeepSpeed)

All but the last import nothing heavy, so that a wrong key is refused at once.
"""

from lezo_ds.config.components import (
    check_data,
    check_partition,
    check_training,
    check_world,
    check_zo,
    eval_every,
    is_replayable,
    make_estimator,
    make_law,
    make_layer_policy,
    make_schedule,
    may_differ_on_resume,
    num_directions,
    num_groups,
    num_passes,
    probes_per_pass,
    trained_part,
    with_steps,
)
from lezo_ds.config.load import config_from_dict, describe, flatten, load_config, nest, read_recipe
from lezo_ds.config.schema import (
    DataConfig,
    Dtype,
    PeftConfig,
    RunConfig,
    TrainConfig,
    ZoConfig,
    keys_with,
)
from lezo_ds.config.yaml_text import dump_yaml, load_yaml
