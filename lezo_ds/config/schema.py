"""Every key of a run's configuration, with its type, limits, default and meaning.

Each class is a section of a recipe. The text below a key is its help (`lezo-ds train --help zo`).
What else is known of a key is metadata on its field, which `keys_with` reads:

    may_differ_on_resume   it affects no weight and no score: it may change on resume
    path                   its value may be a path
    describes_task         it describes a task on the user's records
    of_export              it says how an exported model reads a record

The validators are the checks: of one value, and of the values of a section. They import no code of
the user's, so the configuration of a recorded run is read by the same classes. What a run needs
besides is checked by `components`.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from lezo_ds.errors import UserError
from lezo_ds.registry import Registry, names_code
from lezo_ds.zo.estimators import ESTIMATORS
from lezo_ds.zo.laws import LAWS, Distribution
from lezo_ds.zo.layers import LAYER_POLICIES
from lezo_ds.zo.schedules import SCHEDULES
from lezo_ds.zo.updates import UpdatePrecision

CUSTOM = "custom"
"""The task that the keys of the section data describe."""

Dtype = Literal["fp32", "bf16", "fp16"]
Monitor = Literal["comet", "csv", "tensorboard", "wandb"]

# Every integer has an upper limit, so that a recipe from someone else cannot request endless work.
MOST_ITEMS = 10**9
Count = Annotated[int, Field(ge=1, le=MOST_ITEMS)]  # items processed one after another
CountOrZero = Annotated[int, Field(ge=0, le=MOST_ITEMS)]
Size = Annotated[int, Field(ge=1, le=2**16)]  # items in memory at once
Options = dict[str, str | bool | Annotated[int, Field(ge=-(10**9), le=10**9)] | float]


def _has(*properties: str) -> Any:
    """Return metadata of a key with some properties."""
    return Field(json_schema_extra=dict.fromkeys(properties, True))


_MAY_DIFFER = _has("may_differ_on_resume")
_MOVABLE_PATH = _has("may_differ_on_resume", "path")
_DESCRIBES = _has("describes_task", "of_export")
_OF_EXPORT = _has("of_export")


def _has_property(field: FieldInfo, name: str) -> bool:
    return isinstance(field.json_schema_extra, dict) and name in field.json_schema_extra


def refuse_if(is_broken: bool, problem: str, fix: str) -> None:
    """Raise a UserError if a rule is broken."""
    if is_broken:
        raise UserError(problem, fix=fix)


def _day(value: str) -> str:
    return datetime.date.fromisoformat(value).isoformat()


def _without_escapes(text: str) -> str:
    r"""Refuse \n and \t, which many languages read as one character, and YAML in quotes only."""
    for escape in (r"\n", r"\t"):
        if escape in text:
            problem = "Input has a backslash and an n or a t, which are no line break or tab here"
            raise PydanticCustomError("escape", problem)
    return text


def _in_lower_case(name: str) -> str:
    return name if names_code(name) else name.lower()


def _component(registry: Registry[Any]) -> AfterValidator:
    """Restrict a text to the names in a registry, in any case, or `package.module:Name`."""

    def checked(name: str) -> str:
        if not names_code(name):  # user code is imported when it is needed
            registry.find(name)
        return _in_lower_case(name)

    return AfterValidator(checked)


Text = Annotated[str, AfterValidator(_without_escapes)]
"""A text that a model reads or writes."""
Name = Annotated[str, AfterValidator(_in_lower_case)]
"""The name of a task or a metric. The data say which there are."""
Day = Annotated[str, AfterValidator(_day)]
"""A day, such as 2026-01-31."""


class Section(BaseModel):
    """A section of a recipe. It does not change: `RunConfig.with_section` makes a copy."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class ModelConfig(Section):
    """The base model."""

    path: Annotated[str, _MOVABLE_PATH]
    """Directory of a decoder-only language model in the Hugging Face layout, or its Hub id.
    OWNER/NAME@REVISION selects a branch, tag or commit."""
    dtype: Dtype
    """Weights are stored, gathered and multiplied in this type. fp16 needs a GPU or a CPU with fp16
    arithmetic."""
    bits: Literal[4, 8] | None = None
    """Transformer block matrices are stored and gathered with this number of bits, and dequantized
    to model.dtype only while their module runs. With peft.kind=none, codes of 8 bits are trained
    where they are, and 4 bits are refused. Null stores them in model.dtype."""


class DataConfig(Section):
    """The task, where its examples come from, and how many are used."""

    task: Annotated[Name, _OF_EXPORT] = "sst2"
    """The run trains and scores this task. If data.prompt or data.messages is set, the default is
    custom: a task described by the keys below. package.module:TASK is your own Task (see
    lezo_ds/data/tasks.py)."""
    path: Annotated[str | None, _MOVABLE_PATH] = None
    """Directory of the task's files, train and validation (.jsonl or .parquet). The final score is
    measured on validation records. Null reads them from the Hub, unless data.train is set."""
    train: Annotated[str | None, _MOVABLE_PATH] = None
    """File of your training records: .csv or .tsv with a header, .json, .jsonl or .parquet.
    OWNER/NAME:SPLIT or OWNER/NAME/CONFIG:SPLIT is a split on the Hub."""
    validation: Annotated[str | None, _MOVABLE_PATH] = None
    """The validation loss, which selects the best step, is measured on this file or split. Null
    reserves a fifth of data.train for it, at most 500 records, drawn with data.seed."""
    test: Annotated[str | None, _MOVABLE_PATH] = None
    """The final score is measured on this file or split. Null reserves a fifth of data.train for
    it, at most 1000 records."""
    separator: Annotated[str | None, _MAY_DIFFER] = None
    """What separates the values of a row of .csv and .tsv files. Null is a comma in .csv files, and
    a tab in .tsv files."""
    encoding: Annotated[str | None, _MAY_DIFFER] = None
    """Encoding of .csv and .tsv files, such as cp1252 (Windows-1252). Null is UTF-8, with or
    without a byte order mark."""
    prompt: Annotated[Text | None, _DESCRIBES] = None
    """The model reads this text, in which names in braces are record fields: "{text} This ticket is
    about". A dot selects a nested field. {{ and }} are literal braces."""
    label_field: Annotated[str | None, _DESCRIBES] = None
    """Field with the correct answer, one of data.labels. With data.choices, it may also be the
    index of the correct choice (from 0), its text, or, as in ARC, its name in the field "label"
    next to the texts. Records without a label are skipped."""
    labels: Annotated[list[Text] | dict[str, Text] | None, _DESCRIBES] = None
    """Classification: the model chooses one of these labels. A map gives each label the text that
    continues the prompt; labels with the same text are one class. With data.choices, a list gives
    the labels of the choices, in order."""
    choices: Annotated[list[Text] | None, _DESCRIBES] = None
    """Multiple choice: the model chooses one of the texts that these templates produce, such as
    [{a}, {b}], or one of the texts in a single field."""
    completion: Annotated[Text | None, _DESCRIBES] = None
    """Generation: the model learns to write the text that this template produces, such as {answer},
    or the first correct text in a single field, without white space around it. If a prompt ends
    with a line break, the text keeps its indentation. Without correct answers, train.objective must
    name a reward."""
    messages: Annotated[str | None, _DESCRIBES] = None
    """Chat: the model learns the assistant's turns of the conversation in this field, a list of
    {role, content} or {from, value}, rendered by the tokenizer's chat template. The loss is the
    mean over tokens of these turns, except those with "weight": 0 or "train": false."""
    chat_template: Annotated[bool, _DESCRIBES] = False
    """If true, the chat template renders data.prompt as a user turn and the answer as an assistant
    turn."""
    chat_template_kwargs: Annotated[Options, _OF_EXPORT] = {}
    """Chat template variables, such as enable_thinking: false. Each may be set as
    chat_template_kwargs.NAME. An export's template has them as defaults."""
    system_prompt: Annotated[Text | None, _DESCRIBES] = None
    """Each conversation begins with this system turn unless its record has one."""
    date: Annotated[Day | None, _MAY_DIFFER] = None
    """Chat templates that include the date, such as Llama 3.2's, use this day. Null is the day the
    run started, also after resuming. For a model without a run, it is today."""
    skip_unusable: bool = False
    """If true, unusable records are skipped and counted. By default, they are an error."""
    metric: Annotated[Name | None, _OF_EXPORT] = None
    """Predictions are scored by accuracy, macro_f1 (classification only), f1 (of words) or
    exact_match (generation), token_accuracy (chat), reward (the mean of train.objective), or your
    own function of predictions and examples, which returns 0 to 1 (see lezo_ds/data/metrics.py).
    Null uses the task's metric, or reward if there are no correct answers."""
    protocol: Literal["clean", "mezo"] = "clean"
    """clean uses split sizes that suit the task. mezo follows MeZO's published scripts: it uses
    their split sizes, draws demonstrations for each question, and reproduces three details that
    rarely matter (see docs/protocol.md). With data.train, all records are used."""
    num_train: Count | None = None
    """The run trains on this number of examples. Null uses the protocol's number."""
    num_dev: Count | None = None
    """The validation loss, which selects the best step, is measured on this number of examples.
    Null uses the protocol's number."""
    num_test: Count | None = None
    """The final score is measured on at most this number of examples. Null uses the protocol's
    number."""
    max_length: Annotated[int, Field(ge=1, le=2**20), _OF_EXPORT] = 2048
    """Maximum number of tokens in an input. Longer texts are truncated on the left; what a chat
    template writes is refused."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """This seed selects the examples of each split."""
    num_demonstrations: CountOrZero = 0
    """lezo-ds evaluate shows this number of solved examples before each question: the first
    training examples or, with data.protocol=mezo, others for each question."""

    @property
    def in_chat(self) -> bool:
        """Whether the tokenizer's chat template renders the examples."""
        return self.messages is not None or self.chat_template

    @model_validator(mode="before")
    @classmethod
    def _name_described_task(cls, values: Any) -> Any:
        """Set the default of `task` to custom if the keys describe one."""
        described = isinstance(values, dict) and (  # else it is refused
            values.get("prompt") is not None or values.get("messages") is not None
        )
        return {"task": CUSTOM, **values} if described else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.task == CUSTOM:
            refuse_if(
                self.prompt is None and self.messages is None,
                f"data.task={CUSTOM} needs data.prompt or data.messages",
                "add a template of the text that the model reads, such as "
                '"{text} This ticket is about"',
            )
        else:
            fields = type(self).model_fields.items()
            described = [name for name, field in fields if _has_property(field, "describes_task")]
            named = [f"data.{name}" for name in described if getattr(self, name)]
            refuse_if(
                named != [],
                f"{' and '.join(named)} cannot change data.task={self.task}",
                f"set data.task={CUSTOM}",
            )
        refuse_if(
            self.chat_template_kwargs != {} and not self.in_chat,
            "data.chat_template_kwargs needs data.chat_template=true or data.messages",
            "add data.chat_template=true",
        )
        refuse_if(
            self.train is not None and self.path is not None,
            "data.train and data.path both say where the data is",
            "remove data.path",
        )
        refuse_if(
            bool(self.choices) and isinstance(self.labels, dict),
            "a map in data.labels gives the texts of labels, and data.choices gives them, too",
            "list in data.labels what the column holds for the first, second, ... choice",
        )
        refuse_if(
            self.num_demonstrations > 0 and self.in_chat,
            "data.num_demonstrations shows no examples in a chat template",
            "set data.num_demonstrations=0, or write the examples into the conversations",
        )
        return self


class PeftConfig(Section):
    """The adapter, if the run trains only an adapter."""

    kind: Literal["none", "lora", "prefix"] = "none"
    """The run trains all weights (none), low-rank adapters of linear modules (lora), or a prefix of
    key and value vectors (prefix)."""
    path: Annotated[str | None, _MOVABLE_PATH] = None
    """Training starts from the LoRA adapter that peft wrote to this directory, with the same rank,
    alpha and modules. Null starts from adapters that have no effect."""
    lora_rank: Size = 8
    """Rank r of an adapter's two matrices."""
    lora_alpha: PositiveFloat = 16.0
    """The output of an adapter is scaled by lora_alpha / lora_rank."""
    lora_targets: str = "q_proj,v_proj"
    """Comma-separated names of linear modules that get an adapter; all-linear means all except the
    output head."""
    prefix_length: Size = 5
    """Number of key and value vectors prepended to every sequence in each transformer block."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_if(
            self.path is not None and self.kind != "lora",
            f"peft.path is a LoRA adapter, and peft.kind={self.kind}",
            "set peft.kind=lora, or peft.path=null",
        )
        return self


class ZoConfig(Section):
    """Zeroth-order training. theta denotes the weights, and z a random direction.

    A step updates theta to theta - eta g z. The estimator computes the projected gradient g from
    losses at perturbed weights, such as theta + mu z and theta - mu z.
    """

    learning_rate: NonNegativeFloat | None = None
    """Learning rate eta of the updates, which zo.lr_schedule changes over the run.
    Training needs it."""
    lr_schedule: Annotated[str, _component(SCHEDULES)] = "constant"
    """After the warm-up, the learning rate is constant (constant) or decays to 0 over train.steps
    (linear, cosine). A run with decay cannot resume with a different train.steps."""
    warmup_steps: CountOrZero = 0
    """The learning rate rises linearly to zo.learning_rate over this number of steps."""
    perturbation_scale: PositiveFloat = 1e-3
    """Scale mu of a perturbation along z ("eps" in the paper's tables): the two losses are measured
    at theta + mu z and theta - mu z."""
    sparsity: Annotated[float, Field(ge=0, le=1)] | None = None
    """Each step drops this fraction of the transformer blocks, rounded to whole blocks: 0.6667
    drops 20 of 30. Training needs it. 0 is MeZO. 1 tunes only the weights outside the
    blocks."""
    update_precision: UpdatePrecision = "fp32_master"
    """How 16-bit weights store updates. fp32_master also keeps the 16 low bits of each weight,
    which takes 2 more bytes per parameter. stochastic uses unbiased stochastic rounding. Matrices
    in model.bits=8 have codes, which are always rounded at random."""
    estimator: Annotated[str, _component(ESTIMATORS)] = "spsa"
    """The estimator computes projected gradients from losses: two-sided differences (spsa, as in
    the papers), differences from the loss at theta, which all directions share (one-sided), the
    same divided by their standard deviation (fzoo), two-sided differences divided by theirs (grzo),
    or comparisons of losses or rewards between directions (evolution-strategies)."""
    estimator_options: Options = {}
    """Options of the estimator. Each may be set as estimator_options.NAME."""
    only_blocks: bool = False
    """If true, only the transformer blocks are perturbed and updated. Everything before a step's
    first perturbed block is then computed once for all probes of a pass. The papers perturb all
    weights."""
    noise_distribution: Distribution = "normal"
    """Elements of a direction are drawn from the normal distribution, as in the papers, or are +1
    or -1 (rademacher), which is faster to generate."""
    noise_rank: Annotated[int, Field(ge=0, le=2**10)] = 0
    """With r > 0, a matrix's direction is a sum of r outer products of random vectors. Weights are
    then not copied, and any number of probes share one product with them. Only matrices of linear
    modules in the transformer blocks are perturbed and updated. 0 draws each element independently,
    as in the papers."""
    law: Annotated[str, _component(LAWS)] | None = None
    """The law defines directions. Null is dense, or low-rank if zo.noise_rank is above 0.
    package.module:NAME is your own PerturbationLaw, which gets zo.noise_rank."""
    examples_per_direction: Size | None = None
    """Group size: examples in a group share directions. It must divide train.batch_size and needs
    zo.noise_rank. Null makes the whole batch one group, as in the papers."""
    directions: Annotated[int, Field(ge=1, le=2**12)] = 1
    """Each step tries this number of random directions on the whole batch and averages their
    gradient estimates. N directions on N ranks take as long as one direction on one rank."""
    probes_per_pass: Size | None = None
    """A forward pass runs this number of perturbed copies of the batch and gathers each weight
    once. 2 runs both signs of a direction in one pass. Larger values need more memory but fewer
    gathers (see train --dry-run). With dense directions, all even values give the same results, and
    1, the reference, differs in the last bits. The default is 2 with dense directions. With
    zo.noise_rank, it is all probes of a step, up to 32."""
    layer_policy: Annotated[str, _component(LAYER_POLICIES)] = "uniform"
    """The layer policy chooses the transformer blocks that a step drops. uniform draws them at
    random, as in the paper. fixed keeps the last blocks, or those in its option, in every step.
    package.module:NAME is your own LayerPolicy."""
    layer_policy_options: Options = {}
    """Options of the layer policy. Each may be set as layer_policy_options.NAME."""
    weight_decay: NonNegativeFloat = 0.0
    """Matrices decay by this coefficient, decoupled from their gradients. Blocks that a step drops
    do not decay."""


class TrainConfig(Section):
    """The run's length and batches, and what it evaluates and keeps."""

    steps: Annotated[Count | None, _MAY_DIFFER] = None
    """Total number of steps. Training needs it or train.epochs."""
    epochs: Annotated[PositiveFloat | None, _MAY_DIFFER] = None
    """The run uses each training example this number of times on average. This sets train.steps."""
    batch_size: Size = 16
    """A step uses this number of examples, summed over all ranks."""
    micro_batch_size: Size = 16
    """A forward pass on one rank uses this number of examples. It must divide batch_size. It
    affects the last bits of the losses; the number of ranks does not."""
    eval_batch_size: Annotated[Size, _MAY_DIFFER] = 16
    """An evaluation forward pass has this number of sequences: prompts, each with one candidate if
    there are candidates."""
    eval_every: Annotated[Count | None, _MAY_DIFFER] = None
    """Number of steps between evaluations. Null evaluates after every tenth of the run, as in the
    papers."""
    patience: Annotated[Count | None, _MAY_DIFFER] = None
    """Stop after this number of consecutive evaluations without a better validation loss. That of
    step 0 does not count. Null runs all steps."""
    objective: str | dict[str, float] = "task"
    """Training minimizes the task's own loss (task), minus the mean F1 of generated answers (f1),
    or your own package.module:function, which returns a loss or a reward of the answers (see
    lezo_ds/data/objectives.py). A map gives several rewards their weights."""
    snapshot_every: Annotated[CountOrZero | None, _MAY_DIFFER] = None
    """Number of steps between snapshots. Null uses eval_every; 0 writes only the last snapshot."""
    keep_snapshots: Annotated[CountOrZero, _MAY_DIFFER] = 2
    """Keep this number of the newest snapshots. 0 keeps no weights of a finished run:
    replaying the journal reconstructs them."""
    report_to: Annotated[list[Monitor] | None, _MAY_DIFFER] = None
    """Send the numbers of metrics.jsonl to these DeepSpeed monitors, such as [tensorboard, wandb].
    Files are in run_dir/monitors. A monitor section in the DeepSpeed JSON overrides this."""
    timeout_seconds: Annotated[Size, _MAY_DIFFER] = 1800
    """End the run if a rank does not respond for this number of seconds. Writing a snapshot must
    take less time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        weights = self.objective
        refuse_if(
            isinstance(weights, dict) and not any(weights.values()),
            f"train.objective={weights} does not name a reward with a weight other than 0",
            "name one",
        )
        return self

    @property
    def objectives(self) -> list[str]:
        """The names in `objective`: one, or several rewards."""
        return [self.objective] if isinstance(self.objective, str) else list(self.objective)


class GenerationConfig(Section):
    """How the model generates answers in generation tasks and with a reward."""

    max_new_tokens: Annotated[Size, _OF_EXPORT] = 50
    """Maximum number of tokens in an answer. The default is MeZO's."""
    stop: Annotated[list[Text] | None, _OF_EXPORT] = None
    """Any of these texts ends an answer, as the model's EOS does. Null is the first newline, as in
    MeZO's tasks; in a chat (data.messages or data.chat_template), nothing but the end of the turn
    ends an answer."""
    temperature: NonNegativeFloat = 0.0
    """In training, tokens are sampled at this temperature. 0 takes the most probable token, as
    evaluations always do."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """In training, tokens are sampled only from the most probable ones whose total probability is
    this value. Null samples from all tokens."""
    num_samples: Size = 1
    """In training, this number of answers is sampled for each prompt in a batch. More than one
    needs a temperature."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_if("" in (self.stop or ()), "generation.stop has an empty string", "remove it")
        is_drawn = self.num_samples > 1 or self.top_p is not None
        refuse_if(
            is_drawn and self.temperature == 0,
            "generation.num_samples and top_p need a temperature: without one, all answers are "
            "the same",
            "set generation.temperature=1",
        )
        return self


class ElasticConfig(Section):
    """Elastic replicas: launches that share one run and may join and leave."""

    lighthouse: Annotated[str | None, _MAY_DIFFER] = None
    """Address of torchft's lighthouse, http://HOST:29510. Launches with the same lighthouse are
    replicas of one run: live replicas share each step. Null trains alone (see docs/replicas.md)."""


class RunConfig(Section):
    """The configuration of a run, as recorded in config.yaml and the journal header."""

    run_dir: Annotated[str, _MOVABLE_PATH]
    """Directory of the run. If it already holds the run, the run resumes."""
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] = 0
    """This seed determines the noise, the dropped transformer blocks and the order of examples."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    peft: PeftConfig = PeftConfig()
    zo: ZoConfig = ZoConfig()
    train: TrainConfig = TrainConfig()
    generation: GenerationConfig = GenerationConfig()
    elastic: ElasticConfig = ElasticConfig()

    partition_size: Annotated[Size | None, _MAY_DIFFER] = None
    """Each group of this many ranks, a divisor of the total, shares one copy of the weights. Groups
    exchange only scalars. Use 1 if one GPU can hold the model. Null is all ranks."""
    tensor_parallel: Annotated[Size | None, _MAY_DIFFER] = None
    """Each group of this many ranks, a divisor of the total, splits each weight with DeepSpeed's
    AutoTP instead of ZeRO-3. Weights stay in place and activations are sent. The rest of the
    DeepSpeed JSON applies. Null uses the number in it."""
    deepspeed: Annotated[str | None, _MOVABLE_PATH] = None
    """DeepSpeed's JSON: a path, or a name in ds_configs such as zero3_bf16. Null is ZeRO-3 with
    defaults."""

    def with_section(self, name: str, **values: Any) -> Self:
        """Return a copy with other values in a section."""
        section = getattr(self, name).model_copy(update=values)
        return self.model_copy(update={name: section})


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
"""The sections of a recipe, by name."""

KEYS: dict[str, FieldInfo] = {}
"""The field of each key, by its dotted name, such as train.steps."""
for _name, _field in RunConfig.model_fields.items():
    if _name not in SECTIONS:
        KEYS[_name] = _field
        continue
    for _key, _key_field in SECTIONS[_name].model_fields.items():
        KEYS[f"{_name}.{_key}"] = _key_field


def keys_with(name: str) -> frozenset[str]:
    """Return the dotted keys with a property (see above)."""
    return frozenset(key for key, field in KEYS.items() if _has_property(field, name))
