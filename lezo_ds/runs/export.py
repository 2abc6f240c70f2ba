"""Write the model of a run as a Hugging Face directory, or a run as one small file.

    RUN/ --export_run-----------------------> MODEL/   weights, tokenizer, config.json, README.md,
      |                                         ^      lezo_manifest.json
      +--write_journal--> FILE --export_run-----+      FILE is the journal, without paths of this
                                                       machine; it needs the base model

The header of an exported journal also has `config.digests`, digests of the weights after some
steps, so that whoever replays it knows that the weights are those of the run. Such a file may come
from anyone. Reading it runs no code, imports no module and opens no path that it names. All its
lines are checked before any is kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import GenerationConfig
from transformers.utils import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE, GENERATION_CONFIG_NAME

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import auto_class, load_model_config, resolve_model
from lezo_ds.config import RunConfig, is_replayable, keys_with, num_directions, trained_part
from lezo_ds.config.paths import public_name
from lezo_ds.data.chat import end_of_turn
from lezo_ds.data.encode import generation_ends, load_tokenizer
from lezo_ds.errors import JournalError, LezoError, UserError
from lezo_ds.files import DAMAGE, write_output
from lezo_ds.journal import (
    EvaluationRecord,
    Header,
    JournalRecord,
    encode_journal,
    scan_journal,
)
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.evaluations import is_worse_than_base
from lezo_ds.runs.model_card import model_card, plain
from lezo_ds.runs.opening import recipe_of, restore
from lezo_ds.runs.records import (
    RecordedRun,
    assert_same_model_config,
    config_of,
    read_own_journal,
    read_run,
    refuse_code,
    refuse_other_release,
)
from lezo_ds.runs.results import method_name
from lezo_ds.runs.screen import WORSE

MAX_JOURNAL_BYTES = 1 << 30
"""Most bytes of an exported journal that is read. 100,000 steps of 480 directions fit."""
_MAX_LINE_BYTES = 1 << 24  # a line has 20 bytes for each direction of its step

_ANY_MACHINE = (
    "deepspeed=null",
    "partition_size=null",
    "tensor_parallel=null",
    "train.report_to=null",
)
"""Overrides of a run from a file, which need not be sharded here as where it was written."""

logger = logging.getLogger(__name__)


def export_run(
    path: Path,
    step: str,
    target: Path,
    overrides: Sequence[str] = (),
    *,
    merge: bool = False,
) -> int:
    """Write a run's model as a Hugging Face directory. A collective.

    Args:
        path: the directory of the run, or a file from `write_journal`, which needs an override of
            model.path.
        step: "best", "last" or a number of updates.
        target: the directory to write, which is missing or empty.
        overrides: `key=value` changes of the run's configuration that may differ when it is
            resumed, such as the path of a base model that moved.
        merge: write the whole model, with the products of the run's LoRA adapter added to its
            weights and rounded to their dtype. No peft is needed to load it.

    Returns:
        The number of updates that the weights have seen.

    Raises:
        UserError: the run or the step is not there, or `target` is not empty.
        JournalError: an exported journal is damaged, or was cut short.
        LezoError: the weights are not those that the run had, or cannot be written.
    """
    distributed.init_distributed()

    def read() -> tuple[RecordedRun, int]:
        refuse_taken(target)
        if path.is_file():
            run = read_file(path, overrides)
            _assert_complete(run)
        else:
            run = read_run(path, overrides)
        kind = run.config.peft.kind
        if merge and kind != "lora":
            raise UserError(
                f"--merge adds a LoRA adapter to its base model, and {path} has peft.kind={kind}",
                fix="remove --merge",
            )
        return run, run.find_step(step)

    run, number = distributed.on_rank_zero(read)
    engine = restore(run, number)
    digest = engine.weights.digest()
    expected = run.digests.get(number)
    if expected not in (None, digest):
        raise LezoError(
            f"the weights of step {number} have the digest {digest}, "
            f"and the run's had {expected}; "
            "fix: use the same package version and settings as the run"
        )
    if distributed.rank() == 0:
        comparison = "the same as in the run"
        if expected is None:
            comparison = "no digest in the run to compare with"
        weights = "weights before the merge" if merge else "weights"
        logger.info("digest of the %s: %s (%s)", weights, digest, comparison)
        if is_worse_than_base(run.evaluations):
            logger.warning("%s", WORSE)
    engine.write_model(
        target,
        texts=own_texts(run.config),
        card=partial(
            model_card,
            run.config,
            f"fine-tuned on {run.config.data.task}",
            _origin(run, number, merged=merge),
            _scores(run),
            kind="none" if merge else run.config.peft.kind,
            opened_by=auto_class(engine.module.config).__name__,
            license_of=engine.base.directory,
        ),
        merge=merge,
        recipe=recipe_of(run.config),
    )
    return number


def _origin(run: RecordedRun, step: int, *, merged: bool) -> str:
    """Return how the weights were made, for their card."""
    config = run.config
    sentences = [
        f"lezo_ds trained it with {method_name(config)}, by forward passes only.",
        f"These are the weights after {step} of {run.num_steps} steps.",
    ]
    if merged:
        sentences.append("The adapter is added to the weights.")
    if config.model.bits and config.peft.kind != "none":
        sentences.append(
            f"They were trained and scored on a base in {config.model.bits} bits. On the base in "
            "16 bits, scores differ."
        )
    if is_worse_than_base(run.evaluations):
        sentences.append(f"{WORSE}.")
    return " ".join(sentences)


def _scores(run: RecordedRun) -> list[tuple[str, str, str]]:
    """Return the rows of the table of scores, for the card."""
    rows = []
    for record in run.evaluations:
        scores = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        rows.append((record.split, f"step {record.step}", scores))
    return rows


def refuse_taken(target: Path) -> None:
    """Refuse to write to what exists, unless it is an empty directory, which is replaced."""
    if not target.name:
        raise UserError("--out is the current folder", fix="name a new folder")
    parent = next(each for each in target.absolute().parents if each.exists())
    if not parent.is_dir():
        raise UserError(f"--out {target} is below a file, {parent}", fix="set another --out")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        problem = f"{target} exists and is not an empty directory"
        raise UserError(problem, fix="set another --out")


def own_texts(config: RunConfig) -> dict[str, str]:
    """Return the files of an export of a chat that are not those of its base model, by name.

    Chat templates have the run's values as defaults. The token that ends a turn, which a base
    model may not know as an end, ends answers of `generate`.
    """
    texts: dict[str, str] = {}
    if not config.data.in_chat:
        return texts
    directory = resolve_model(config.model.path)
    options = config.data.chat_template_kwargs
    tokenizer = load_tokenizer(str(directory), None, options)
    defaults = ""
    for name, value in sorted(options.items()):
        literal = json.dumps(value, ensure_ascii=False)  # Jinja writes true and texts as JSON does
        defaults += (
            f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}"
        )
    templates = tokenizer.backend.chat_template
    if isinstance(templates, str):
        templates = {"default": templates}
    if defaults:
        for name, template in templates.items():
            file = f"{CHAT_TEMPLATE_DIR}/{Path(name).name}.jinja"
            texts[CHAT_TEMPLATE_FILE if name == "default" else file] = defaults + template
    model_config = load_model_config(directory)
    ends = generation_ends(directory, model_config)
    new = [token for token in end_of_turn(tokenizer).ids if token not in ends]
    if new:
        file = directory / GENERATION_CONFIG_NAME
        if file.is_file():
            values = json.loads(file.read_text())
        else:  # `generate` takes tokens such as the padding from config.json
            values = GenerationConfig.from_model_config(model_config).to_diff_dict()
            values.pop("_from_model_config")  # where an object came from; not for files
        values["eos_token_id"] = [*ends, *new]
        texts[GENERATION_CONFIG_NAME] = json.dumps(values, indent=2) + "\n"
    return texts


def _assert_complete(run: RecordedRun) -> None:
    """Refuse an exported journal that was cut short: its best and last step would be others."""
    file = run.directory.path
    is_torn = not file.read_bytes().endswith(b"\n")
    if is_torn or max(run.digests, default=0) > run.num_steps:
        raise JournalError(
            f"{file} was cut short: it ends after {run.num_steps} steps; fix: copy it again"
        )


def write_journal(path: Path, file: Path) -> int:
    """Write a zeroth-order run, finished or not, as one file, and return its size in bytes.

    Raises:
        UserError: `path` is not a run, or a base model and a journal do not give its weights; or
            `file` exists, as the run's own journal does.
        LezoError: the file cannot be written.
    """
    refuse_taken(file)
    run = read_run(path)
    if not is_replayable(run.config):
        raise UserError(
            f"run {path} cannot be replayed from a base model and a journal: "
            f"peft.kind={run.config.peft.kind}",
            fix="share the directory that lezo-ds export --out writes",
        )
    # The reader has neither the paths of this machine nor its number of ranks.
    config = {
        **run.header.config,
        "deepspeed": None,
        "partition_size": None,
        "tensor_parallel": None,
        "elastic": {"lighthouse": None},
        "digests": {str(step): digest for step, digest in run.digests.items()},
    }
    for key in keys_with("path"):
        section, _, name = key.partition(".")
        if name and config[section][name] is not None:
            config[section] = {**config[section], name: public_name(config[section][name])}
    content = encode_journal(replace(run.header, config=config), run.journal.records)
    write_output(file, content)
    return len(content)


def read_file(file: Path, overrides: Sequence[str]) -> RecordedRun:
    """Read a file that `write_journal` wrote, or that anybody else did.

    Args:
        file: an exported journal.
        overrides: `key=value` changes of its configuration. One of them sets model.path.

    Raises:
        UserError: the file is not an exported journal, or not one of a run of that model.
        JournalError: a line is damaged.
    """
    try:
        if file.stat().st_size > MAX_JOURNAL_BYTES:
            raise ValueError(f"it has more than {MAX_JOURNAL_BYTES} bytes")
        lines = scan_journal(file, _MAX_LINE_BYTES)
        header: Header = next(lines).item
        refuse_other_release(header, file)
        # Of the header, only the types of its members have been checked.
        digests = {}
        for step, digest in header.config.get("digests", {}).items():
            digests[int(step)] = str(digest)
        base = plain(header.config["model"]["path"])
        config = config_of(header, file, (*_ANY_MACHINE, *overrides))
        if not any(override.startswith("model.path=") for override in overrides):
            raise UserError(
                f"{file} needs the base model of its run, {base}", fix="add model.path=DIR"
            )
        assert_same_model_config(header, config.model.path)
    except DAMAGE as error:
        raise UserError(
            f"{file} is not an exported journal: {type(error).__name__}: {error}",
            fix="copy it again in binary mode, "
            "or write it again: lezo-ds export --run DIR --journal FILE",
        ) from error
    text_config = load_model_config(resolve_model(config.model.path)).get_text_config()
    fits = is_replayable(config)
    if config.peft.kind == "lora" and config.peft.lora_rank > text_config.hidden_size:
        fits = False  # such a rank could ask for any amount of memory
    num_groups = text_config.num_hidden_layers
    refuse_code({"zo.law": config.zo.law}, overrides)
    if trained_part(config.zo) == "all" and config.peft.kind == "none":
        num_groups += 2  # two are outside the blocks
    for line in lines:  # one in memory at a time
        fits = fits and _fits(line.item, num_groups, num_directions(config))
    if not fits:
        raise UserError(
            f"{file} is not the journal of a run of {config.model.path}",
            fix="set model.path to its base model",
        )
    return RecordedRun(read_own_journal(file), RunDirectory(file), config, digests, overrides)


def _fits(record: JournalRecord, num_groups: int, num_directions: int) -> bool:
    """Return whether a record can be of a run of this number of groups and directions."""
    if isinstance(record, EvaluationRecord):
        return True
    dropped = list(record.dropped_layers)
    if dropped != sorted(set(dropped)) or any(group >= num_groups for group in dropped):
        return False
    if len(record.projected_grads) > num_directions:
        return False
    return len(record.layer_weights) in (0, num_groups)
