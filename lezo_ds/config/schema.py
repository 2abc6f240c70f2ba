"""Every key of a run's configuration, with its type, limits, default and meaning."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from lezo_ds.config.reading import ExactStrings, Named, Reader, Strings, split
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Protocol
from lezo_ds.tasks.custom import CUSTOM
from lezo_ds.tasks.metrics import METRICS
from lezo_ds.zo.estimators import ESTIMATORS
from lezo_ds.zo.laws import Distribution
from lezo_ds.zo.layers import LAYER_POLICIES
from lezo_ds.zo.schedules import SCHEDULES
from lezo_ds.zo.updates import UpdatePrecision

Dtype = Literal["fp32", "bf16", "fp16"]
Method = Literal["lezo", "adamw", "zero_shot", "icl"]
ZEROTH_ORDER: frozenset[Method] = frozenset({"lezo"})
TRAINED: frozenset[Method] = ZEROTH_ORDER | {"adamw"}
Monitors = Annotated[list[Literal["comet", "csv", "tensorboard", "wandb"]], BeforeValidator(split)]
Number = Annotated[int, Field(ge=1, le=10**9)]  # of what is done, or was read, one after the other
NumberOrNone = Annotated[int, Field(ge=0, le=10**9)]
Size = Annotated[int, Field(ge=1, le=2**16)]  # of what is in memory at once
Options = dict[str, str | bool | Annotated[int, Field(ge=-(10**9), le=10**9)] | float]

_MAY_DIFFER = Field(json_schema_extra={"may_differ_on_resume": True})
_STRICT = ConfigDict(
    strict=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelConfig:
    path: Annotated[str, _MAY_DIFFER]
    """Hub id or directory of a decoder language model in the Hugging Face layout."""
    dtype: Dtype
    """Type in which the weights are stored, gathered and multiplied. fp16 needs a GPU, or a CPU with fp16."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataConfig:
    task: Annotated[str, Named(TASKS, CUSTOM)] = "sst2"
    """Name of the task. The default is custom if data.prompt or data.messages is set: a task that the keys
    below describe. package.module:TASK is a Task of your own (see lezo_ds/tasks/base.py)."""
    path: Annotated[str | None, _MAY_DIFFER] = None
    """Directory with the task's files (.jsonl or .parquet). Null reads the hub, unless data.train is set."""
    train: Annotated[str | None, _MAY_DIFFER] = None
    """File with your own training records: .csv or .tsv (with a header), .json, .jsonl or .parquet. Or a
    split on the hub, as OWNER/NAME:SPLIT or OWNER/NAME/CONFIG:SPLIT."""
    validation: Annotated[str | None, _MAY_DIFFER] = None
    """File or split of the validation loss, which selects the best step. Null draws a fifth of data.train, at
    most 500 records, by data.seed."""
    test: Annotated[str | None, _MAY_DIFFER] = None
    """File or split of the final score. Null draws a fifth of data.train, at most 1000 records."""
    prompt: str | None = None
    """The text that the model reads, with fields of the record in braces: "{text} This ticket is about". A
    dot leads into a nested field. {{ and }} are braces."""
    label_field: str | None = None
    """Field with the right answer: one of data.labels; or, with data.choices, also the number of the right
    choice (from 0) or its text. Records without a label are left out."""
    labels: Strings | dict[str, str] | None = None
    """Classification: the labels, or a map from each label to the text that the model continues the prompt
    with. With data.choices: a list of the labels of the choices, in their order."""
    choices: Strings | None = None
    """Multiple choice: templates of the choices, such as [{a}, {b}], or one field with a list of texts."""
    completion: str | None = None
    """Generation: template of the text to write, such as {answer}, or one field with a list of right texts,
    of which the first is trained on. Without any right answers, train.objective must name a reward."""
    messages: str | None = None
    """Chat: the field with a conversation, a list of {role, content} or {from, value}, for the tokenizer's
    chat template. The loss is the mean over the assistant's tokens, without turns of weight 0."""
    chat_template: bool = False
    """Whether the chat template writes data.prompt as a user's turn, and the answer as the assistant's."""
    system_prompt: str | None = None
    """First turn of each conversation, unless the record has a system's turn of its own."""
    skip_unusable: bool = False
    """Whether records that cannot be used are left out with a count. By default, they are an error."""
    metric: Annotated[str, Named(METRICS)] | None = None
    """The score: accuracy, macro_f1 (classification only), f1 (of words) or exact_match (generation),
    token_accuracy (chat), reward (the mean of train.objective), or your own function (predictions, examples)
    -> 0 to 1 (see lezo_ds/tasks/metrics.py). Null takes the task's own: reward without right answers."""
    protocol: Protocol = "clean"
    """clean uses split sizes that fit the task. mezo does what MeZO's published scripts do: split sizes,
    demonstrations drawn for each question, and three details that rarely matter (see docs/protocol.md). With
    data.train, all records are used."""
    num_train: Number | None = None
    """Number of training examples. Null takes the protocol's number."""
    num_dev: Number | None = None
    """Number of validation examples, whose loss selects the best step. Null takes the protocol's number."""
    num_test: Number | None = None
    """Maximum number of test examples, which give the final score. Null takes the protocol's number."""
    max_length: Annotated[int, Field(ge=1, le=2**20)] = 2048
    """Maximum length of an input, in tokens. Longer ones are cut on the left, conversations at their end."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed that selects the examples of each split."""
    num_demonstrations: Number = 32
    """Number of solved examples before each question, with method icl: the first training examples, or others
    for each question with data.protocol mezo."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class PeftConfig:
    kind: Literal["none", "lora", "prefix"] = "none"
    """What is trained: all weights (none), low-rank adapters (lora), or a prefix of vectors (prefix)."""
    lora_rank: Size = 8
    """Rank r of the adapters."""
    lora_alpha: PositiveFloat = 16.0
    """The output of an adapter is scaled by lora_alpha / lora_rank."""
    lora_targets: str = "q_proj,v_proj"
    """Names of the linear modules that get an adapter, separated by commas."""
    prefix_length: Size = 5
    """Number of key and value vectors before every sequence, in each transformer block."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class AdamWConfig:
    learning_rate: NonNegativeFloat = 1e-5
    """Learning rate at the first step. It falls linearly to 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Coefficient of the decoupled weight decay."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ZoConfig:
    learning_rate: NonNegativeFloat | None = None
    """Learning rate eta. Method lezo needs it. zo.lr_schedule changes it over the run."""
    lr_schedule: Annotated[str, Named(SCHEDULES)] = "constant"
    """How the learning rate changes after the warm-up. linear and cosine let it fall to 0 over train.steps;
    such a run cannot be resumed with another train.steps."""
    warmup_steps: NumberOrNone = 0
    """Number of steps over which the learning rate rises to zo.learning_rate, in equal parts."""
    perturbation_scale: PositiveFloat = 1e-3
    """Perturbation scale mu ("eps" in the paper's tables). The two losses of a direction z are measured at
    theta + mu z and theta - mu z."""
    sparsity: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the transformer blocks that each step drops, rounded to whole blocks: 0.6667 drops 20 of 30.
    Method lezo needs it. 0 is MeZO. With 1, only the weights outside the blocks are tuned."""
    update_precision: UpdatePrecision = "fp32_master"
    """How an update is stored in 16-bit weights. fp32_master also keeps the 16 low bits, which takes 2 more
    bytes per parameter; stochastic rounds at random without bias."""
    estimator: Annotated[str, Named(ESTIMATORS)] = "spsa"
    """How losses become projected gradients: spsa (two-sided, the papers'), one-sided (all directions share
    the loss at theta), fzoo (one-sided differences, divided by their deviation), evolution-strategies (the
    losses or rewards of directions, compared with each other)."""
    estimator_options: Options = field(default_factory=dict)
    """Options of the estimator, as estimator_options.NAME."""
    only_blocks: bool = False
    """Whether only the transformer blocks are perturbed and updated. Everything before the first block that a
    step perturbs is then computed once for all probes of a pass. The papers perturb all weights."""
    noise_distribution: Distribution = "normal"
    """Distribution of a direction's elements: normal (the papers') or rademacher (+1 or -1, drawn faster)."""
    directions: Annotated[int, Field(ge=1, le=2**12)] = 1
    """Number of random directions per step, each on the whole batch, whose gradient estimates are averaged. N
    directions on N ranks take the time of one direction on one rank."""
    probes_per_pass: Size = 2
    """Number of perturbed copies of the batch in one forward pass, which gathers each weight once. 2 runs
    both signs of a direction in one pass. All even numbers give the same results; larger ones need more
    memory and fewer gathers (see train --dry-run). 1, the reference, differs in the last bits."""
    layer_policy: Annotated[str, Named(LAYER_POLICIES)] = "uniform"
    """How the transformer blocks that a step drops are chosen. uniform is the paper's own policy. fixed keeps
    the last blocks, or those of its option, in every step. adalezo learns which blocks change the loss most.
    package.module:NAME is a LayerPolicy of your own."""
    layer_policy_options: Options = field(default_factory=dict)
    """Options of the layer policy, as layer_policy_options.NAME."""
    weight_decay: NonNegativeFloat = 0.0
    """Coefficient of the decoupled weight decay of matrices. Blocks that a step drops do not decay."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainConfig:
    steps: Annotated[Number | None, _MAY_DIFFER] = None
    """Number of steps of the whole run. Methods lezo and adamw need it."""
    batch_size: Size = 16
    """Number of examples in a step, summed over all ranks."""
    micro_batch_size: Size = 16
    """Number of examples in one forward pass of one rank. It must divide batch_size. It affects the last bits
    of the losses; the number of ranks does not."""
    eval_batch_size: Annotated[Size, _MAY_DIFFER] = 16
    """Number of sequences (prompts, each with one candidate if any) in a forward pass of an evaluation."""
    eval_every: Annotated[Number | None, _MAY_DIFFER] = None
    """Number of steps between evaluations. Null evaluates every tenth of the run, as in the papers."""
    patience: Annotated[Number | None, _MAY_DIFFER] = None
    """Stop after so many evaluations in a row without a better validation loss. Null does all steps."""
    objective: str = "task"
    """What is minimized: the task's own loss (task), minus the mean F1 of generated answers (f1), or your own
    package.module:function, a loss or a reward of the answers (see lezo_ds/data/objectives.py)."""
    snapshot_every: Annotated[NumberOrNone | None, _MAY_DIFFER] = None
    """Number of steps between snapshots. Null uses eval_every; 0 writes only the last one."""
    keep_snapshots: Annotated[NumberOrNone, _MAY_DIFFER] = 2
    """Number of the newest snapshots to keep. 0, the default of lezo-ds sweep with lezo, keeps no weights of
    a finished run: a replay of the journal gives them back, but those of adamw are gone."""
    report_to: Annotated[Monitors | None, _MAY_DIFFER] = None
    """DeepSpeed's monitors that get the content of metrics.jsonl, such as [tensorboard, csv]. Files are in
    run_dir/monitors. A monitor's section in the DeepSpeed JSON replaces these settings."""
    timeout_seconds: Annotated[Size, _MAY_DIFFER] = 1800
    """End the run if a rank does not answer for this long. Writing a snapshot must take less time."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class GenerationConfig:
    max_new_tokens: Size = 50
    """Maximum length of an answer, in tokens. The default is MeZO's."""
    stop: ExactStrings | None = None
    """Texts that end an answer, as the model's EOS does. Null is the first newline, as in MeZO's tasks."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of sampling in training. 0 takes the most probable token, as evaluations always do."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Draw from the most probable tokens only that have this probability together. Null draws from all."""
    num_samples: Size = 1
    """Number of answers that are drawn for each prompt of a training batch. More need a temperature."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ElasticConfig:
    lighthouse: Annotated[str | None, _MAY_DIFFER] = None
    """Address of torchft's lighthouse, http://HOST:29510. Launches with the same one are replicas of one run:
    each step is shared by those that are there. Null trains alone (see docs/replicas.md)."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RunConfig:
    run_dir: Annotated[str, _MAY_DIFFER]
    """Directory of the run. If it already holds the run, the run is resumed."""
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] = 0
    """Seed of the noise, of the dropped transformer blocks and of the order of the examples."""
    method: Method = "lezo"
    """lezo (zo.sparsity=0 is MeZO), adamw (first-order), or one that does not train: zero_shot or
    icl (in-context learning)."""
    model: ModelConfig
    data: DataConfig
    zo: ZoConfig
    adamw: AdamWConfig
    peft: PeftConfig
    train: TrainConfig
    generation: GenerationConfig
    elastic: ElasticConfig

    partition_size: Annotated[Size | None, _MAY_DIFFER] = None
    """Number of ranks that share one copy of the weights, a divisor of the number of ranks. Such groups
    exchange only scalars with each other. Use 1 if one GPU can hold the model. Null is all ranks."""
    tensor_parallel: Annotated[Size | None, _MAY_DIFFER] = None
    """Number of ranks that split each weight by DeepSpeed's AutoTP instead of ZeRO-3, a divisor of the number
    of ranks. Weights stay where they are, and activations travel. Null takes that of the DeepSpeed JSON."""
    deepspeed: Annotated[str | None, _MAY_DIFFER] = None
    """Path of the DeepSpeed JSON, or a name in ds_configs, as zero3_bf16. Null is ZeRO-3 with defaults."""


_OLD_KEYS = {
    "is gone": "data.calibration generation.keep_perturbed generation.top_k train.check_every "
    "train.packed train.score_before zo.max_skipped_steps zo.outlier_factor "
    "zo.layer_policy=weighted zo.layer_policy=window",
    "is method=lezo with zo.sparsity=0": "method=mezo",
    "is part of data.protocol=mezo": "data.demonstrations data.mezo_details",
    "is the variable OMP_NUM_THREADS": "train.cpu_threads",
    "is train.steps": "adamw.epochs",
    "is zo.sparsity, a share of the blocks": "zo.num_dropped_layers",
    "is zo.weight_decay, or gone": "zo.update_rule zo.update_rule_options",
}
"""What became of keys, or of values of a key, that versions before 0.3.0 had."""

READER = Reader(RunConfig, _OLD_KEYS)
