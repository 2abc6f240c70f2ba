"""lezo-ds init: looks at a model and a table once, and writes what it finds into a recipe.

This is the only place that guesses: a run reads exactly what its recipe says. Guessed are the
separator and the encoding of a table, the columns (a column is taken without an option only if it
alone can be it), the labels, the template, the method and the size of a step. What is found is
printed: the columns, the labels with their counts, what a bag of words reaches on them, and the
first records as the model reads them. recipe.jinja is the template of the recipe.

On GPUs, the memory plan chooses how they share the weights. On a CPU, one step is measured, and one
that would take long has fewer examples.
"""

from __future__ import annotations

import ast
import csv
import json
import logging
import shlex
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import charset_normalizer
import torch

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import load_model_config, resolve_model
from lezo_ds.config import RunConfig, config_from_dict, load_yaml
from lezo_ds.data.encode import load_tokenizer
from lezo_ds.data.records import TABLES, UTF_8, read_records
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.data.template import parse_template
from lezo_ds.errors import UserError, cut, did_you_mean, one_line, printable
from lezo_ds.files import filled_template, write_output
from lezo_ds.tools.dry_run import measured_step, time_lines
from lezo_ds.tools.examples import example_lines
from lezo_ds.tools.memory_plan import ModelSizes, measured_inputs, memory_of, ways

_SAMPLE = 2**20  # bytes of a table from which its encoding is found
_SNIFFED_LINES = 20
_MAX_LABELS = 200  # a column with more different values is not taken for labels, unless it is named
_MAX_LABEL_LENGTH = 60  # characters
_RARE = 0.01  # of the records; labels below are marked
_SHOWN_RECORDS = 3
_BATCH_SIZES = (16, 8, 4)
_MAX_RANKS = 16  # which share the 16 probes of FZOO's step, or the 16 examples of other steps
LONG_STEP = 10.0  # seconds; if a step takes longer, the recipe has fewer examples
_USABLE_PART = 0.8  # of a GPU's memory: a plan is accurate to 20 %
_CHOICES = ("choices", "options", "endings")
"""The usual names of columns with the choices of a question."""
_ANSWERS = {"completion": "prompt", "response": "prompt", "output": "instruction"}
"""The usual names of columns with answers, and those of the columns with their questions."""
# bf16 rounds losses eight times as coarsely as fp16 (docs/opt-30b.md), so it is for models whose
# activations leave the range of fp16. These are those that vLLM refuses in fp16 (vllm/config).
_BEYOND_FP16 = {"gemma2", "gemma3", "gemma3_text", "glm4", "plamo2"}

logger = logging.getLogger(__name__)

Columns = Mapping[str, Sequence[Any]]
"""The values of each column, None where a record lacks it."""


def main(arguments: Namespace) -> None:
    """Write the recipe, and print what it was made of."""
    target = arguments.out
    if target.exists():
        raise UserError(f"{target} exists", fix="give another --out, or remove it")
    distributed.init_distributed()
    directory = resolve_model(arguments.model)
    layout = table_layout(Path(arguments.data), arguments)
    columns = read_columns(arguments.data, layout)
    has_template = bool(load_tokenizer(str(directory)).backend.chat_template)
    task = describe_task(columns, arguments, has_template=has_template)
    facts = _facts(arguments, directory, columns, task | layout)
    for line in _column_lines(columns, task, facts["unread"]):
        print(printable(line), flush=True)
    data = load_task_data(_config(facts))
    if "labels" in task:
        line = baseline(columns[arguments.text], columns[task["label_field"]])
        print(line, flush=True)
    for line in example_lines(data, _SHOWN_RECORDS):
        print(printable(line))
    seconds = _fit(facts, data)
    for line in time_lines(_config(facts), seconds):
        print(line)
    write_output(target, _recipe(facts))
    if "labels" in task:
        print("If the baseline is not enough, fit the head, in minutes; if that is not, train:")
    print("\n".join([*_commands(facts), f"{target} is written"]))


def table_layout(path: Path, arguments: Namespace) -> dict[str, str]:
    """Return data.separator and data.encoding: those of the options, or else what a table has.

    Nothing is guessed of a compressed table. A file in UTF-8 is taken as such. The separator is
    what csv.Sniffer finds in the first lines.
    """
    given = {
        "separator": arguments.separator,
        "encoding": arguments.encoding,
    }
    layout = {key: value for key, value in given.items() if value is not None}
    usual = TABLES.get(path.suffix.lower())
    if usual is None or not path.is_file():
        return layout
    with path.open("rb") as file:
        sample = b"".join(file.readlines(_SAMPLE))
    best = charset_normalizer.from_bytes(sample).best()
    if "encoding" not in layout and not _is_utf_8(sample) and best is not None:
        # Of the encodings in which the text is the same, Windows' Western one is most frequent.
        is_western = "cp1252" in best.could_be_from_charset
        encoding = "cp1252" if is_western else best.encoding
        layout["encoding"] = encoding
        lines = sample.decode(encoding, errors="replace").splitlines()
        shown = next((line for line in lines if not line.isascii()), "")
        logger.warning("%s is a guess, and --encoding sets another: %s", encoding, cut(shown, 80))
    with suppress(csv.Error, LookupError):  # a table of one column, or no encoding
        lines = sample.decode(layout.get("encoding", UTF_8), errors="replace").splitlines()
        if "separator" not in layout and usual not in "".join(lines[:1]):
            found = csv.Sniffer().sniff("\n".join(lines[:_SNIFFED_LINES]), ",;\t|")
            layout["separator"] = found.delimiter
    return layout


def _is_utf_8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_columns(source: str, layout: Mapping[str, str]) -> Columns:
    """Return the columns of a table.

    Raises:
        UserError: it cannot be read, or its first row is probably a record, not names.
    """
    records = list(read_records(source, **layout))
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    for number, (name, values) in enumerate(columns.items(), start=1):
        if name.startswith("Unnamed: ") and any(values):  # as pandas calls such a column
            raise UserError(
                f"column {number} of {source} has values and no name",
                fix="let the first line name each column, and remove what comes before it",
            )
        if name in values:
            raise UserError(
                f"the first row of {source} names the columns, but {name} is also a value in its "
                "column",
                fix="add a first row with names such as text,label, or rename this column",
            )
    return columns


def describe_task(
    columns: Columns, arguments: Namespace, *, has_template: bool = False
) -> dict[str, Any]:
    """Return the keys of a recipe's section `data` that describe the task of a table.

    Columns that no option names are put into the arguments.

    Args:
        columns: Those of the table.
        arguments: Of the command: text, label, answer, messages, reward, drop_label, label_map.
        has_template: Whether the model has a chat template, which then writes the prompt.

    Raises:
        UserError: The task is not clear, or no objective learns from such a table.
    """
    for option in ("text", "label", "answer", "messages"):
        name = getattr(arguments, option)
        if name is not None and name not in columns:
            fix = did_you_mean(name, columns, f"use one of {', '.join(columns)}")
            raise UserError(f"--{option} {name} is not a column", fix=fix)
    _refuse_unlearnable(columns, arguments)
    conversations = [name for name in columns if _are_turns(_first(columns[name]))]
    targets = (arguments.label, arguments.answer, arguments.messages, arguments.reward)
    if not any(targets):
        for answer, question in _ANSWERS.items():
            has_both = {answer, question} <= columns.keys()
            if has_both and arguments.text in (None, question):
                arguments.text = question
                arguments.answer = answer
        if arguments.answer is None and conversations:
            arguments.messages = _only("messages", "turns", conversations)
    if arguments.messages is not None:
        return {"messages": arguments.messages}
    lists = [name for name in _CHOICES if name in columns]
    if not arguments.answer and not arguments.reward and arguments.label is None:
        few = [name for name in columns if _is_few_valued(columns[name])]
        others = [name for name in few if name != arguments.text]
        arguments.label = _only("label", "few different values", others)
    if arguments.text is None:
        taken = {arguments.label, arguments.answer}
        texts = [name for name in columns if name not in taken and _are_texts(columns[name])]
        arguments.text = _only("text", "texts", texts or conversations)
    return _task(columns, arguments, lists, has_template)


def _task(
    columns: Columns, arguments: Namespace, lists: Sequence[str], has_template: bool
) -> dict[str, Any]:
    prompt = f"{{{arguments.text}}}"
    if arguments.text == "instruction" and any(columns.get("input", ())):
        prompt += "\n\n{input}"
    is_chat = has_template or _are_turns(_first(columns[arguments.text]))
    template = {"chat_template": True} if is_chat else {}
    if arguments.reward is not None:
        return {"prompt": prompt, **template}
    target = arguments.answer or arguments.label
    if arguments.text != "prompt" or arguments.label is not None:
        question = "answer" if lists else target
        prompt += f"\n{question.replace('_', ' ').capitalize()}:"  # such as "{body}\nTopic:"
    if arguments.answer is not None:
        return {"prompt": prompt, "completion": f"{{{arguments.answer}}}", **template}
    task = {"prompt": prompt, "label_field": arguments.label, **template}
    if lists:
        name = _only("label", "choices", lists)
        # As in ARC, an object may hold the texts beside their names.
        field = f"{name}.text" if isinstance(_first(columns[name]), Mapping) else name
        return task | {"choices": [f"{{{field}}}"]}
    counts = label_counts(columns[arguments.label])
    for label in (*arguments.drop_label, *dict(arguments.label_map)):
        if label not in counts:
            fix = did_you_mean(label, counts, "write one that the table has")
            raise UserError(f"column {arguments.label} has no label {label}", fix=fix)
    labels = counts.keys() - set(arguments.drop_label)
    if 2 * len(labels) > counts.total():
        raise UserError(
            f"column {arguments.label} has {len(labels)} labels in {counts.total()} records",
            fix=f"add records, or give --answer {arguments.label} if the model is to write them",
        )
    task["labels"] = sorted(labels)
    if arguments.label_map:
        same = {label: label for label in sorted(labels)}
        task["labels"] = same | dict(arguments.label_map)
    if arguments.drop_label:
        task["skip_unusable"] = True  # records with a label that is none of these
    return task


def _refuse_unlearnable(columns: Columns, arguments: Namespace) -> None:
    """Refuse tables of pairs, of judged answers, of turns as texts, and with images."""
    named = {arguments.text, arguments.label, arguments.answer}
    for name in {"image", "images"} & columns.keys():
        raise UserError(
            f"column {name}: images are not read, and their placeholder would be trained on",
            fix="remove the column and what stands for its images in the texts",
        )
    if "rejected" in columns and not (arguments.answer or arguments.reward or arguments.messages):
        raise UserError(
            "column rejected has one of two answers, and no objective learns from pairs",
            fix="give --text COLUMN --answer chosen, or --messages chosen if it has turns",
        )
    judged = {"completion", "messages", "conversations"} & columns.keys()
    for name in columns:
        different = {str(value).lower() for value in columns[name]}
        are_truths = different <= {"true", "false"}
        if are_truths and judged and name not in named and arguments.reward is None:
            raise UserError(
                f"column {name} says which answers are good, and no objective learns from bad ones",
                fix=f"keep the records of good answers, and remove the column {name}",
            )
        first = _first(columns[name])
        is_list = isinstance(first, str) and first.lstrip().startswith("[")
        if is_list and _are_turns(_parsed(first)):
            fix = "store the lists themselves in a .jsonl or .parquet file"
            raise UserError(f"column {name} has lists of turns stored as text", fix=fix)


def _first(values: Sequence[Any]) -> Any:
    """Return the first value that is not empty."""
    return next((value for value in values if value), None)


def _parsed(text: str) -> object:
    """Return the list in a text, as JSON or as Python writes it."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError):
            continue
    return None


def _are_turns(value: object) -> bool:
    """Return whether a value is a list of turns of a conversation."""
    if not isinstance(value, list) or not value:
        return False
    keys = value[0].keys() if isinstance(value[0], Mapping) else set()
    has_text = not keys.isdisjoint(("content", "value", "tool_calls"))
    return has_text and not keys.isdisjoint(("role", "from"))


def label_counts(values: Sequence[object]) -> Counter[str]:
    """Return how many records have each label. Empty cells, null and NaN are none."""
    texts = [str(value) for value in values if value is not None and value == value]
    return Counter(text for text in texts if text.strip())


def _is_few_valued(values: Sequence[Any]) -> bool:
    """Return whether a column has short values that repeat."""
    if any(isinstance(value, list | Mapping) for value in values):
        return False
    labels = label_counts(values)
    if not 1 < len(labels) <= min(_MAX_LABELS, len(values) / 2):
        return False
    return max(map(len, labels)) <= _MAX_LABEL_LENGTH


def _are_texts(values: Sequence[Any]) -> bool:
    """Return whether most values are different strings, most of them of several words."""
    strings = {value for value in values if isinstance(value, str)}
    num_sentences = sum(" " in string.strip() for string in strings)
    are_different = len(strings) > len(values) / 2
    return are_different and num_sentences > len(strings) / 2


def _only(option: str, meaning: str, names: Sequence[str]) -> str:
    """Return the only column that may be meant, or ask for the option that names it."""
    if len(names) == 1:
        return names[0]
    problem = f"no column has {meaning}"
    if names:
        problem = f"several columns have {meaning}: {', '.join(names)}"
    fix = f"give --{option} COLUMN"
    if option == "label":
        fix += ", or --answer COLUMN for texts to write"
    raise UserError(problem, fix=fix)


def _column_lines(
    columns: Columns, task: Mapping[str, Any], unread: Sequence[str]
) -> Iterator[str]:
    """Yield a line for each column, and for each label with its count."""
    for name, values in columns.items():
        num_different = len(set(map(str, values)))
        shown = cut(repr(_first(values)), 60)
        note = " (not read)" if name in unread else ""
        yield f"column  {name}: {num_different} different values, such as {shown}{note}"
    if "labels" not in task:
        return
    counts = label_counts(columns[task["label_field"]])
    for label, number in counts.most_common():
        rare = ""
        if number < _RARE * counts.total():
            rare = f", below 1 %: --drop-label {shlex.quote(label)}, or --label-map A=B?"
        yield f"label   {label}: {number}{rare}"


def baseline(words: Sequence[Any], names: Sequence[Any]) -> str:
    """Return the share of the most frequent label, and what a bag of words reaches, as a line."""
    texts = []
    labels = []
    for text, label in zip(words, names, strict=True):
        if label_counts([label]):
            texts.append(str(text))
            labels.append(str(label))
    most = max(Counter(labels).values())
    line = f"baseline  the most frequent label alone: {most / len(labels):.3f}"
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import KFold, cross_val_score
        from sklearn.pipeline import make_pipeline
    except ImportError:
        return f"{line}; pip install 'lezo_ds[baseline]' to see what a bag of words reaches"
    model = make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=1000))
    folds = KFold(5, shuffle=True, random_state=0)
    try:
        scores = cross_val_score(model, texts, labels, cv=folds, error_score="raise")
    except ValueError:  # as of fewer than five records, or of texts without words
        return f"{line}; a bag of words cannot be fitted to so few words"
    return f"{line}; a bag of words (scikit-learn, five folds): {scores.mean():.3f}"


def _facts(
    arguments: Namespace, directory: Path, columns: Columns, task: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what recipe.jinja reads. `_fit` changes batch_size and the keys after it."""
    decoder = load_model_config(directory).get_text_config()
    method = "fzoo"
    if arguments.label is not None or arguments.reward is not None:
        method = "evolution-strategies"
    answers = [str(value) for value in columns.get(arguments.answer, ())]
    tokens = load_tokenizer(str(directory)).encode(answers or [""])
    num_ranks = 1
    dtype = "fp32"
    if distributed.device().type != "cpu":
        num_gpus = min(torch.cuda.device_count(), _MAX_RANKS)
        num_ranks = 1 << (num_gpus.bit_length() - 1)  # so that they share a step evenly
        # bf16 is emulated before 8.0: on V100 (7.0) and T4 (7.5).
        has_bf16 = torch.cuda.get_device_capability() >= (8, 0)
        dtype = "bf16" if has_bf16 and decoder.model_type in _BEYOND_FP16 else "fp16"
    facts = {
        "target": arguments.out,
        "directory": directory,
        "model": arguments.model,
        "data": arguments.data,
        "name": Path(arguments.data).stem,
        "task": task,
        "unread": [] if arguments.reward else _unread(columns, task),
        "title": printable(f"{arguments.data} with {arguments.model}"),
        "reward": arguments.reward,
        "is_asked_for": arguments.method is not None,
        "method": arguments.method or method,
        "has_lines": any("\n" in answer.strip() for answer in answers),
        "max_new_tokens": max(50, *map(len, tokens)) + 1,
        "max_length": min(2048, getattr(decoder, "max_position_embeddings", None) or 2048),
        "num_records": len(next(iter(columns.values()))),
        "width": decoder.hidden_size,
        "num_ranks": num_ranks,
        "dtype": dtype,
        "on_gpu": dtype != "fp32",
        "batch_size": _BATCH_SIZES[0],
        "others": {},
    }
    return facts | {"command": _commands(facts)[-1]}


def _unread(columns: Columns, task: Mapping[str, Any]) -> list[str]:
    """Return the columns that no key of a task names. Chat templates read tools, too."""
    templates = [task.get("prompt", ""), task.get("completion", ""), *task.get("choices", ())]
    fields = parse_template("data.prompt", "".join(templates)).fields
    named = {"tools", task.get("label_field"), task.get("messages"), *fields}
    named.update(field.partition(".")[0] for field in fields)  # {section.name}
    return [name for name in columns if name not in named]


def _recipe(facts: Mapping[str, Any]) -> str:
    template = Path(__file__).with_name("recipe.jinja")
    return filled_template(template, **facts, yaml=_yaml)


def _yaml(value: object) -> str:
    """Return YAML of a value on one line. JSON is YAML, but for characters that are not shown."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def _config(facts: Mapping[str, Any]) -> RunConfig:
    target = facts["target"]
    values = load_yaml(_recipe(facts))
    return config_from_dict(values, str(target), folder=target.parent)


def _fit(facts: dict[str, Any], data: TaskData) -> float | None:
    """Choose a method that the model takes, and what a step has. Return its seconds, if measured.

    Raises:
        UserError: The model takes none, or not the one that was asked for.
    """
    one_probe = {"others": {"zo.probes_per_pass": 1}}
    tried: list[dict[str, Any]] = [{}, one_probe]
    if not facts["is_asked_for"]:
        tried.insert(1, {"method": "fzoo"})
    for changes in tried:
        facts |= changes
        try:
            if not facts["on_gpu"]:
                return _fit_on_cpu(facts, data)
            _fit_on_gpus(facts, data)
            break
        except UserError as error:
            # A model that computes with the shape of its batch takes one copy in a pass.
            if changes is one_probe:
                raise
            logger.warning("the recipe tries other settings: %s", one_line(error))
    return None


def _fit_on_cpu(facts: dict[str, Any], data: TaskData) -> float | None:
    facts["batch_size"] = _BATCH_SIZES[-1]
    config = _config(facts)
    inputs = measured_inputs(config, data)
    model = ModelSizes(config)
    memory = memory_of(config, model, inputs, num_ranks=1, on_gpu=False)
    needed = sum(memory.values())
    seconds = measured_step(config, data, needed, num_steps=1)
    if seconds is None:
        return None
    per_example = seconds / _BATCH_SIZES[-1]
    for size in _BATCH_SIZES:
        if size * per_example <= LONG_STEP:
            break
    facts["batch_size"] = size
    return per_example * size


def _fit_on_gpus(facts: dict[str, Any], data: TaskData) -> None:
    """Take the first way that fits: in 16 bits, if possible with exact updates, or in 8 bits."""
    gpus = range(torch.cuda.device_count())
    sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus]
    most = min(sizes) * _USABLE_PART
    others = facts["others"]
    storages = ((None, "fp32_master"), (None, "stochastic"), (8, "fp32_master"))
    for bits, precision in storages:
        facts["others"] = {**others, "model.bits": bits, "zo.update_precision": precision}
        config = _config(facts)
        model = ModelSizes(config)
        inputs = measured_inputs(config, data)
        fitting = ways(config, model, inputs, facts["num_ranks"], most)
        keys, _ = next(fitting, ("deepspeed=zero3_cpu_offload", 0))
        if "offload" not in keys:  # which comes last
            break
    else:
        logger.warning(
            "weights do not fit the GPUs, and are in the host's memory; take more GPUs, or set "
            "model.bits=4 peft.kind=lora"
        )
    pairs = [word.split("=") for word in keys.split()]
    facts["others"] |= dict(pairs)


def _commands(facts: Mapping[str, Any]) -> list[str]:
    """Return the commands that suit the task, in their order. The last one trains."""
    launcher = "lezo-ds"
    if facts["num_ranks"] > 1:
        launcher = f"deepspeed --num_gpus {facts['num_ranks']} --module lezo_ds"
    recipe = shlex.quote(str(facts["target"]))
    commands = [f"{launcher} train --config {recipe}"]
    if "labels" in facts["task"]:
        model = shlex.quote(facts["model"])
        out = shlex.quote(f"runs/{facts['name']}-fitted")
        commands.insert(0, f"{launcher} fit-head --model {model} --config {recipe} --out {out}")
    return commands
