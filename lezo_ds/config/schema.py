"""Every key of a run's configuration, with its type, limits, default and meaning.

The text below a key is its help in `lezo-ds train --help`. A class is a section of the recipe. A
key that is marked with `_MAY_DIFFER` may change when a run is resumed: it decides neither the
weights nor their scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from lezo_ds.config.key_types import Day, ExactStrings, Named, Strings, split
from lezo_ds.config.reading import Reader
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Protocol
from lezo_ds.tasks.custom import CUSTOM
from lezo_ds.tasks.metrics import METRICS
from lezo_ds.zo.estimators import ESTIMATORS
from lezo_ds.zo.laws import LAWS, Distribution
from lezo_ds.zo.layers import LAYER_POLICIES
from lezo_ds.zo.schedules import SCHEDULES
from lezo_ds.zo.updates import UpdatePrecision

Dtype = Literal["fp32", "bf16", "fp16"]
Method = Literal["lezo", "adamw", "zero_shot", "icl"]
ZEROTH_ORDER: frozenset[Method] = frozenset({"lezo"})
TRAINED: frozenset[Method] = ZEROTH_ORDER | {"adamw"}
Monitors = Annotated[list[Literal["comet", "csv", "tensorboard", "wandb"]], BeforeValidator(split)]

# Every integer has an upper limit, so that no recipe of someone else asks for endless work.
Count = Annotated[int, Field(ge=1, le=10**9)]  # of what is done, or read, one after the other
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Size = Annotated[int, Field(ge=1, le=2**16)]  # of what is in memory at once
Options = dict[str, str | bool | Annotated[int, Field(ge=-(10**9), le=10**9)] | float]

_MAY_DIFFER = Field(json_schema_extra={"may_differ_on_resume": True})
_STRICT = ConfigDict(
    strict=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelConfig:
    """The base model."""

    path: Annotated[str, _MAY_DIFFER]
    """A decoder language model is loaded from this directory in the Hugging Face layout, or by this
    id from the hub. OWNER/NAME@REVISION is a branch, tag or commit there."""
    dtype: Dtype
    """Weights are stored, gathered and multiplied in this type. fp16 needs a GPU, or a CPU that
    computes in fp16."""
    bits: Literal[4, 8] | None = None
    """The matrices of the transformer blocks are stored and gathered in so many bits, and are there
    in model.dtype only while their module runs. They cannot be trained: this needs peft.kind=lora
    or prefix. Null stores them in model.dtype."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataConfig:
    """The task, where its examples come from, and how many are used."""

    task: Annotated[str, Named(TASKS, CUSTOM)] = "sst2"
    """The run trains and scores this task. If data.prompt or data.messages is set, the default is
    custom: a task that the keys below describe. package.module:TASK is a Task of your own (see
    lezo_ds/tasks/base.py)."""
    path: Annotated[str | None, _MAY_DIFFER] = None
    """The task's files (.jsonl or .parquet) are read from this directory. Null reads them from the
    hub, unless data.train is set."""
    train: Annotated[str | None, _MAY_DIFFER] = None
    """Your training records are read from this file: .csv or .tsv with a header, .json, .jsonl or
    .parquet. OWNER/NAME:SPLIT or OWNER/NAME/CONFIG:SPLIT is a split on the hub."""
    validation: Annotated[str | None, _MAY_DIFFER] = None
    """The validation loss, which selects the best step, is measured on this file or split. Null
    sets a fifth of data.train aside for it, at most 500 records, which data.seed draws."""
    test: Annotated[str | None, _MAY_DIFFER] = None
    """The final score is measured on this file or split. Null sets a fifth of data.train aside for
    it, at most 1000 records."""
    encoding: Annotated[str, _MAY_DIFFER] = "utf-8"
    """The .csv and .tsv files of data.train, data.validation and data.test are in this encoding,
    such as cp1252 (Windows-1252)."""
    prompt: str | None = None
    """The model reads this text, in which names in braces stand for fields of the record: "{text}
    This ticket is about". A dot leads into a nested field. {{ and }} are braces."""
    label_field: str | None = None
    """This field has the right answer, which is one of data.labels. With data.choices, it may also
    be the number of the right choice (from 0) or its text. Records without a label are left out."""
    labels: Strings | dict[str, str] | None = None
    """Classification: the model chooses one of these labels. A map gives each label the text that
    continues the prompt; labels of the same text are one class. With data.choices, a list gives the
    choices their labels, in order."""
    choices: Strings | None = None
    """Multiple choice: the model chooses one of the texts that these templates make, such as
    [{a}, {b}], or one of the texts in a single field."""
    completion: str | None = None
    """Generation: the model learns to write the text that this template makes, such as {answer}, or
    the first of the right texts in a single field. Without any right answers, train.objective must
    name a reward."""
    messages: str | None = None
    """Chat: the model learns the assistant's turns of the conversation in this field, a list of
    {role, content} or {from, value}, in the tokenizer's chat template. The loss is the mean over
    the tokens of these turns, except those of weight 0."""
    chat_template: bool = False
    """If true, the chat template writes data.prompt as a user's turn, and the answer as the
    assistant's."""
    chat_template_kwargs: Options = field(default_factory=dict)
    """The chat template reads these values, such as enable_thinking: false. Each may be set as
    chat_template_kwargs.NAME. An export has them as the defaults of its template."""
    system_prompt: str | None = None
    """Each conversation begins with this system turn, unless its record has one."""
    date: Annotated[Day | None, _MAY_DIFFER] = None
    """Chat templates that write the date, such as that of Llama 3.2, write this day. Null is the
    day on which the run starts, which it keeps when it is resumed. Of a model without a run, it is
    today."""
    skip_unusable: bool = False
    """If true, records that cannot be used are left out and counted. By default, they are an
    error."""
    metric: Annotated[str, Named(METRICS)] | None = None
    """Predictions are scored by accuracy, macro_f1 (classification only), f1 (of words) or
    exact_match (generation), token_accuracy (chat), reward (the mean of train.objective), or your
    own function of predictions and examples, which returns 0 to 1 (see lezo_ds/tasks/metrics.py).
    Null takes the task's metric, or reward if there are no right answers."""
    splits: Annotated[Literal["stratified", "random"], _MAY_DIFFER] = "stratified"
    """Splits that are drawn from data.train have each label in its share (stratified). Test records
    that repeat the text of a training or validation record are then left out. random does neither,
    as all versions up to 0.4 did."""
    protocol: Protocol = "clean"
    """clean uses split sizes that fit the task. mezo does what MeZO's published scripts do: it uses
    their split sizes, draws demonstrations for each question, and copies three details that rarely
    matter (see docs/protocol.md). With data.train, all records are used."""
    num_train: Count | None = None
    """The run trains on this number of examples. Null takes the protocol's number."""
    num_dev: Count | None = None
    """The validation loss, which selects the best step, is measured on this number of examples.
    Null takes the protocol's number."""
    num_test: Count | None = None
    """The final score is measured on at most this number of examples. Null takes the protocol's
    number."""
    max_length: Annotated[int, Field(ge=1, le=2**20)] = 2048
    """An input has at most this number of tokens. Longer ones are cut on the left, conversations at
    their end."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """This seed selects the examples of each split."""
    num_demonstrations: Count = 32
    """With method icl, this number of solved examples comes before each question: the first
    training examples or, with data.protocol=mezo, others for each question."""

    @property
    def in_chat(self) -> bool:
        """Whether the tokenizer's chat template writes the examples."""
        return self.messages is not None or self.chat_template


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class PeftConfig:
    """The adapter, if only an adapter is trained."""

    kind: Literal["none", "lora", "prefix"] = "none"
    """The run trains all weights (none), low-rank adapters of linear modules (lora), or a prefix of
    key and value vectors (prefix)."""
    path: Annotated[str | None, _MAY_DIFFER] = None
    """A LoRA adapter starts from the one that peft has written to this directory, with the same
    rank, alpha and modules. Null starts with adapters that change nothing."""
    lora_rank: Size = 8
    """The two matrices of an adapter have this rank r."""
    lora_alpha: PositiveFloat = 16.0
    """The output of an adapter is scaled by lora_alpha / lora_rank."""
    lora_targets: str = "q_proj,v_proj"
    """Linear modules with these names, separated by commas, get an adapter; or all-linear: all of
    them but the output head."""
    prefix_length: Size = 5
    """In each transformer block, this number of key and value vectors comes before every
    sequence."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class AdamWConfig:
    """First-order training, with method=adamw."""

    learning_rate: NonNegativeFloat = 1e-5
    """The learning rate begins with this value and falls linearly to 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Weights decay by this coefficient, decoupled from their gradients."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ZoConfig:
    """Zeroth-order training, with method=lezo. theta are the weights, and z is a random direction.

    A step updates theta by theta - eta g z. The estimator makes the projected gradient g of losses
    at perturbed weights, such as theta + mu z and theta - mu z.
    """

    learning_rate: NonNegativeFloat | None = None
    """Updates have this learning rate eta, which zo.lr_schedule changes over the run. Method lezo
    needs it."""
    lr_schedule: Annotated[str, Named(SCHEDULES)] = "constant"
    """After the warm-up, the learning rate stays as it is (constant), or falls to 0 over
    train.steps (linear, cosine). A run in which it falls cannot be resumed with another
    train.steps."""
    warmup_steps: CountOrZero = 0
    """The learning rate rises to zo.learning_rate over this number of steps, in equal parts."""
    perturbation_scale: PositiveFloat = 1e-3
    """A direction z perturbs the weights with this scale mu ("eps" in the paper's tables): its two
    losses are measured at theta + mu z and theta - mu z."""
    sparsity: Annotated[float, Field(ge=0, le=1)] | None = None
    """Each step drops this share of the transformer blocks, rounded to whole blocks: 0.6667 drops
    20 of 30. Method lezo needs it. 0 is MeZO. 1 tunes only the weights outside the blocks."""
    update_precision: UpdatePrecision = "fp32_master"
    """An update is stored in 16-bit weights in one of two ways. fp32_master also keeps the 16 low
    bits of each weight, which takes 2 more bytes per parameter. stochastic rounds at random without
    bias."""
    estimator: Annotated[str, Named(ESTIMATORS)] = "spsa"
    """The estimator turns losses into projected gradients: by two-sided differences (spsa, the
    papers'), by differences from the loss at theta, which all directions share (one-sided), by the
    same divided by their standard deviation (fzoo), by two-sided differences divided by theirs
    (grzo), or by comparing the losses or rewards of the
    directions with each other (evolution-strategies)."""
    estimator_options: Options = field(default_factory=dict)
    """The estimator gets these options, each of which may be set as estimator_options.NAME."""
    only_blocks: bool = False
    """If true, only the transformer blocks are perturbed and updated. Everything before the first
    block that a step perturbs is then computed once for all probes of a pass. The papers perturb
    all weights."""
    noise_distribution: Distribution = "normal"
    """The elements of a direction are drawn from the normal distribution (the papers'), or are +1
    or -1 (rademacher), which is drawn faster."""
    noise_rank: Annotated[int, Field(ge=0, le=2**10)] = 0
    """With r > 0, a direction of a matrix is a sum of r outer products of random vectors. Weights
    are not copied then, and any number of probes share one product with them. Only the matrices of
    linear modules in the transformer blocks are perturbed and updated. 0 draws each element by
    itself, as in the papers."""
    law: Annotated[str, Named(LAWS)] | None = None
    """The law says what a direction is. Null is dense, or low-rank if zo.noise_rank is above 0.
    package.module:NAME is a PerturbationLaw of your own."""
    examples_per_direction: Size | None = None
    """Group size: examples in a group share directions. It divides train.batch_size and needs
    zo.noise_rank. Null makes the whole batch one group, as in the papers."""
    directions: Annotated[int, Field(ge=1, le=2**12)] = 1
    """Each step tries this number of random directions on the whole batch, and averages their
    gradient estimates. N directions on N ranks take the time of one direction on one rank."""
    probes_per_pass: Size | None = None
    """A forward pass runs this number of perturbed copies of the batch, and gathers each weight
    once. 2 runs both signs of a direction in one pass. Larger numbers need more memory and fewer
    gathers (see train --dry-run). With dense directions, all even numbers give the same results,
    and 1, the reference, differs in the last bits. The default is 2 with dense directions. With
    zo.noise_rank it is all of a step, or 32 if there are more."""
    layer_policy: Annotated[str, Named(LAYER_POLICIES)] = "uniform"
    """The layer policy chooses the transformer blocks that a step drops. uniform draws them at
    random, as the paper does. fixed keeps the last blocks, or those of its option, in every step.
    package.module:NAME is a LayerPolicy of your own."""
    layer_policy_options: Options = field(default_factory=dict)
    """The layer policy gets these options, each of which may be set as
    layer_policy_options.NAME."""
    weight_decay: NonNegativeFloat = 0.0
    """Matrices decay by this coefficient, decoupled from their gradients. Blocks that a step drops
    do not decay."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainConfig:
    """The length of the run, its batches, and what it evaluates and keeps."""

    steps: Annotated[Count | None, _MAY_DIFFER] = None
    """The whole run has this number of steps. Methods lezo and adamw need it, or train.epochs."""
    epochs: Annotated[PositiveFloat | None, _MAY_DIFFER] = None
    """The run uses each training example this number of times, on average. It sets train.steps."""
    batch_size: Size = 16
    """A step uses this number of examples, summed over all ranks."""
    micro_batch_size: Size = 16
    """A forward pass of one rank uses this number of examples. It must divide batch_size. It
    affects the last bits of the losses; the number of ranks does not."""
    eval_batch_size: Annotated[Size, _MAY_DIFFER] = 16
    """A forward pass of an evaluation has this number of sequences: prompts, each with one
    candidate if there are candidates."""
    eval_every: Annotated[Count | None, _MAY_DIFFER] = None
    """Evaluate the weights each time this number of steps is done. Null evaluates them after every
    tenth of the run, as in the papers."""
    patience: Annotated[Count | None, _MAY_DIFFER] = None
    """Stop after this number of evaluations in a row without a better validation loss. Null does
    all steps."""
    objective: str | dict[str, float] = "task"
    """Training minimizes the task's own loss (task), minus the mean F1 of generated answers (f1),
    or your own package.module:function, which returns a loss or a reward of the answers (see
    lezo_ds/data/objectives.py). A map gives each of several rewards its weight."""
    snapshot_every: Annotated[CountOrZero | None, _MAY_DIFFER] = None
    """Write a snapshot each time this number of steps is done. Null uses eval_every; 0 writes only
    the last snapshot."""
    keep_snapshots: Annotated[CountOrZero, _MAY_DIFFER] = 2
    """Keep this number of the newest snapshots. 0, the default of lezo-ds sweep with lezo, keeps no
    weights of a finished run: a replay of the journal gives them back, but those of adamw are
    gone."""
    report_to: Annotated[Monitors | None, _MAY_DIFFER] = None
    """Send the content of metrics.jsonl and all settings to these monitors of DeepSpeed, such as
    [tensorboard, wandb]. Files are in run_dir/monitors. A monitor's section in the DeepSpeed JSON
    replaces these settings."""
    timeout_seconds: Annotated[Size, _MAY_DIFFER] = 1800
    """End the run if a rank does not answer for this number of seconds. Writing a snapshot must
    take less time."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class GenerationConfig:
    """How the model writes answers, in tasks that generate, and with a reward."""

    max_new_tokens: Size = 50
    """An answer has at most this number of tokens. The default is MeZO's; in a chat (data.messages,
    or data.chat_template without candidates), it is 256, or half of data.max_length."""
    stop: ExactStrings | None = None
    """Any of these texts ends an answer, as the model's EOS does. Null is the first newline, as in
    MeZO's tasks. In a chat, the default is []: an answer ends at the end of its turn."""
    temperature: NonNegativeFloat = 0.0
    """In training, tokens are drawn at this temperature. 0 takes the most probable token, as
    evaluations always do."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """In training, tokens are drawn only from the most probable ones that have this probability
    together. Null draws from all."""
    num_samples: Size = 1
    """In training, this number of answers is drawn for each prompt of a batch. More than one needs
    a temperature."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ElasticConfig:
    """Replicas: launches that share one run, and may come and go."""

    lighthouse: Annotated[str | None, _MAY_DIFFER] = None
    """torchft's lighthouse has this address, http://HOST:29510. Launches that name the same one are
    replicas of one run: those that are there share each step. Null trains alone (see
    docs/replicas.md)."""


class ReadingConfig(NamedTuple):
    """How a model reads records and answers them. A run has it, and so has a model without one.

    Attributes:
        model: directory or hub id of the model whose tokenizer reads.
        data: the section of this name.
        generation: the section of this name.
        objective: train.objective, which judges answers.
        method: icl shows solved examples before each question.
        batch_size: train.eval_batch_size, the sequences in a forward pass.
        seed: answers are drawn by it.
    """

    model: str
    data: DataConfig
    generation: GenerationConfig
    objective: str | Mapping[str, float]
    method: Method
    batch_size: int
    seed: int

    @property
    def objectives(self) -> list[str]:
        """The names in `objective`: one, or those of several rewards."""
        return [self.objective] if isinstance(self.objective, str) else list(self.objective)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RunConfig:
    """The configuration of a run: what config.yaml and the header of its journal record."""

    run_dir: Annotated[str, _MAY_DIFFER]
    """The run is in this directory. If the directory already holds the run, it is resumed."""
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] = 0
    """This seed decides the noise, the dropped transformer blocks and the order of the examples."""
    method: Method = "lezo"
    """lezo trains with forward passes only (zo.sparsity=0 is MeZO), and adamw with gradients. The
    other methods score the model without training it: zero_shot, and icl (in-context learning)
    with demonstrations in the prompt."""
    model: ModelConfig
    data: DataConfig
    zo: ZoConfig
    adamw: AdamWConfig
    peft: PeftConfig
    train: TrainConfig
    generation: GenerationConfig
    elastic: ElasticConfig

    partition_size: Annotated[Size | None, _MAY_DIFFER] = None
    """This number of ranks, a divisor of the number of all ranks, shares one copy of the weights.
    Such groups exchange only scalars with each other. Use 1 if one GPU can hold the model. Null is
    all ranks."""
    tensor_parallel: Annotated[Size | None, _MAY_DIFFER] = None
    """This number of ranks, a divisor of the number of all ranks, splits each weight by DeepSpeed's
    AutoTP instead of ZeRO-3. Weights stay where they are, and activations travel. The rest of the
    DeepSpeed JSON serves. Null takes the number in it."""
    deepspeed: Annotated[str | None, _MAY_DIFFER] = None
    """DeepSpeed reads this JSON: a path, or a name in ds_configs such as zero3_bf16. Null is ZeRO-3
    with defaults."""

    @property
    def reading(self) -> ReadingConfig:
        """How the run reads records and answers them."""
        return ReadingConfig(
            self.model.path,
            self.data,
            self.generation,
            self.train.objective,
            self.method,
            self.train.eval_batch_size,
            self.seed,
        )


READER = Reader(RunConfig)
