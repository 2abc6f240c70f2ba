"""The configuration of a run: what its recipe and its command line ask for.

    yaml_text     YAML 1.2, without trust
    key_types     types of keys that pydantic lacks
    reading       nested values, flat values and overrides, read strictly
    schema        every key, with its type, limits, default and help
    paths         what a path in a recipe is relative to
    paper         the tables of LeZO, and their recipes
    components    what the values stand for: estimator, layer policy, task, numbers of passes
    checks        the rules between values
    run_config    all of these: from a recipe to a RunConfig
    deepspeed     the DeepSpeed JSON (imports DeepSpeed)

All but the last import nothing heavy, so that a wrong key is refused at once.
"""

from lezo_ds.config.checks import (
    check_arguments,
    check_partition,
    check_reading,
    check_world,
    checked_optimizer,
    with_steps,
)
from lezo_ds.config.components import (
    copies_per_pass,
    eval_every,
    find_task,
    is_replayable,
    make_estimator,
    make_law,
    make_layer_policy,
    make_schedule,
    may_differ_on_resume,
    num_directions,
    num_passes,
    probes_per_pass,
    trained_part,
)
from lezo_ds.config.reading import flatten
from lezo_ds.config.run_config import config_from_dict, config_to_dict, find_recipe, load_config
from lezo_ds.config.schema import (
    TRAINED,
    ZEROTH_ORDER,
    DataConfig,
    Dtype,
    PeftConfig,
    ReadingConfig,
    RunConfig,
    ZoConfig,
)
from lezo_ds.config.yaml_text import dump_yaml, load_yaml
