"""The command line: `lezo-ds COMMAND`, which is also `python -m lezo_ds COMMAND`.

Each command has two functions. `_train` adds the arguments of `train` to its parser. Its docstring
is the description in `lezo-ds train --help`; its first line is the summary in `lezo-ds --help`.
`run_train` does the work. COMMANDS lists both.

A command imports torch and other large libraries only after parsing its arguments, so invalid
arguments fail immediately.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import inspect
import io
import json
import logging
import math
import os
import pkgutil
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from lezo_ds import __version__
from lezo_ds.config import check_training, describe, dump_yaml, load_config
from lezo_ds.config.load import key_of
from lezo_ds.config.names import meant
from lezo_ds.config.paths import expand, find_file
from lezo_ds.config.schema import KEYS, SECTIONS
from lezo_ds.errors import (
    LezoError,
    UserError,
    cut,
    did_you_mean,
    end_with,
    forget_launcher,
    launched_rank,
    leave,
    printable,
    require_package,
)

_RECIPE_HELP = "a YAML file, or the name of a shipped recipe"

_CHAT_SECONDS = 30 * 24 * 3600  # that other ranks wait for the next line
_BEST = "best"  # the step with the lowest validation loss
_UNUSABLE = {errno.ENAMETOOLONG, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""OSError codes of a bad user-supplied path, wherever it is first used, or of a full disk."""


class _Parser(argparse.ArgumentParser):
    """Raises UserError for bad arguments: a one-line error with exit code 2."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"lezo-ds {command}".strip(),
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # DeepSpeed's launcher adds it.
        self.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)

    def add_keys(self) -> None:
        self.add_argument(
            "overrides", nargs="*", metavar="key=value", help="override a key of the recipe or run"
        )

    def error(self, message: str) -> NoReturn:
        fix = f"see {self.prog} --help"
        if "unrecognized" in message:
            options = [word for word in message.split() if word.startswith("--")]
            option = options[0].partition("=")[0] if options else ""
            fix = did_you_mean(option, self._option_string_actions.keys() - {"--help"}, fix)
            key = option.removeprefix("--")
            keys = [key] if key in KEYS else meant(key)
            if keys and not self.prog.endswith(("export", "init", "report")):
                fix = f"write {' or '.join(f'{key}=VALUE' for key in keys)}, without dashes"
            elif "resume" in key:
                fix = "leave it out: the same command resumes a run"
        raise UserError(f"{self.prog}: {message}", fix=fix)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer above 0")
    return int(text)


def _code(text: str) -> str:
    if ":" not in text:
        raise UserError(
            f"{text} is not MODULE:FUNCTION", fix=f"write it like rewards:{text} for rewards.py"
        )
    return text


def _share(text: str) -> float:
    share = math.nan
    with suppress(ValueError):
        share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return share


def _pair(text: str) -> tuple[str, str]:
    label, equals, other = text.partition("=")
    if not (label and equals and other):
        raise argparse.ArgumentTypeError(f"{text} is not LABEL=OTHER")
    return label, other


def _path(text: str) -> Path:
    return Path(_name(text))


def _name(text: str) -> str:
    """Read a path or a Hub name. A shell does not expand the ~ in --out=~/runs."""
    return expand(text, "an argument")


def _train(parser: _Parser) -> None:
    """Fine-tune a model, or check a recipe and print its memory.

    deepspeed --num_gpus 2 --module lezo_ds train --config RECIPE key=value ...

    The same command resumes a run. ~ and $VAR are expanded in paths. A path in a YAML file is
    relative to the file's folder if it begins with ./ or ../ or, except for run_dir, exists there.
    """
    add = parser.add_argument
    add("--config", help=_RECIPE_HELP)
    add(
        "--dry-run",
        action="store_true",
        help="check everything but the weights, and print memory, disk and time",
    )
    add("--gpus", type=_positive, help="with --dry-run: plan for this number of GPUs")
    add(
        "--gpu-memory",
        type=float,
        help="with --dry-run: list what fits GPUs sold with this many GB",
    )
    add(
        "--examples",
        type=_positive,
        metavar="N",
        help="with --dry-run: only print what the model reads and learns of N training examples",
    )
    add("--print-config", action="store_true", help="print the configuration as a YAML recipe")
    parser.add_keys()


def run_train(arguments: argparse.Namespace) -> None:
    if arguments.config is None and not arguments.overrides:
        raise UserError(
            "lezo-ds train needs a recipe",
            fix="lezo-ds train --config RECIPE; lezo-ds init MODEL DATA writes a recipe",
        )
    if not arguments.dry_run and (arguments.examples or arguments.gpus or arguments.gpu_memory):
        raise UserError(
            "--examples, --gpus and --gpu-memory only show what a run would do",
            fix="add --dry-run, or start it by deepspeed --num_gpus N --module lezo_ds train ...",
        )
    if arguments.gpu_memory is not None and not 0 < arguments.gpu_memory < math.inf:
        raise UserError(
            f"--gpu-memory {arguments.gpu_memory:g} is not a number above 0",
            fix="give the GB that a GPU is sold with, such as 24",
        )
    config = load_config(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(dump_yaml(config.model_dump()), end="")
        return
    if not arguments.examples:
        check_training(config)
    from lezo_ds import distributed
    from lezo_ds.data.task_data import load_task_data
    from lezo_ds.runs.screen import run_summary
    from lezo_ds.runs.trainer import train
    from lezo_ds.tools.dry_run import dry_run
    from lezo_ds.tools.examples import example_lines

    if arguments.dry_run:
        distributed.init_distributed()  # the plan depends on the number of ranks
        if arguments.examples:  # of a recipe that may lack keys of training
            lines = example_lines(load_task_data(config), arguments.examples)
        else:
            lines = dry_run(config, arguments.gpus, arguments.gpu_memory)
        for line in lines:
            if distributed.rank() == 0:
                print(line, flush=True)
        return
    results = train(config)
    if distributed.rank() == 0:
        print(run_summary(config.run_dir, results))


def _evaluate(parser: _Parser) -> None:
    """Score a model, or the weights of a run at any step.

    lezo-ds evaluate --run DIR --step best
    lezo-ds evaluate --model DIR --config RECIPE data.task=sst2
    lezo-ds evaluate --run DIR --lm-eval hellaswag,arc_easy --limit 100
    """
    add = _add_weights(parser)
    add("--split", choices=("test", "dev"), default="test", help="the examples to score")
    add("--json", action="store_true", help="print the scores as JSON instead of a line")
    add(
        "--out",
        type=_path,
        metavar="DIR",
        help="write config.yaml, results.json and predictions/ there, as a run does",
    )
    add(
        "--lm-eval",
        metavar="TASK,...",
        help="run lm-evaluation-harness tasks instead: task names or YAML files",
    )
    add("--limit", type=_positive, metavar="N", help="with --lm-eval: use N examples per task")
    parser.add_keys()


def _add_weights(parser: _Parser) -> Callable[..., Any]:
    """Add the options that select weights, and return the function that adds more options."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=_path, help="directory of a run")
    source.add_argument(
        "--model",
        type=_name,
        metavar="DIR",
        help="directory of a model or of an exported adapter, or a Hub id",
    )
    add("--config", help="with --model: take everything else from this recipe")
    add(
        "--step",
        default=_BEST,
        help="step of the run: best (lowest validation loss), last, or a number",
    )
    return add


def _open_weights(arguments: argparse.Namespace, *keys: str, needs_task: bool = False) -> Any:
    """Open the weights of a run or a model, applying these `key=value` overrides before the user's.

    `needs_task` rejects a model without a task.
    """
    if arguments.run is not None and arguments.config is not None:
        raise UserError(
            "a run has its own configuration: --config goes with --model", fix="remove --config"
        )
    model = Path(arguments.model or "")
    if (model / "config.yaml").is_file() and not (model / "config.json").exists():
        raise UserError(f"{model} is a run, not a model", fix=f"use --run {model}")
    from lezo_ds.runs.opening import open_model, open_run

    overrides = [*keys, *arguments.overrides]
    if arguments.run is not None:
        return open_run(arguments.run, arguments.step, overrides)
    if arguments.step != _BEST:
        raise UserError("--step is for --run: a model has one step", fix="remove --step")
    return open_model(arguments.model, overrides, arguments.config, needs_task=needs_task)


def run_evaluate(arguments: argparse.Namespace) -> None:
    if arguments.lm_eval is not None:
        if "" in arguments.lm_eval.split(","):  # the harness reads "" as the working directory
            raise UserError("--lm-eval has an empty name", fix="write --lm-eval TASK,TASK")
        require_package("lm_eval", "--lm-eval needs lm-eval", "'lezo_ds[lm-eval]'")
        for option, is_given in (("split", arguments.split != "test"), ("out", arguments.out)):
            if is_given:
                fix = f"remove --{option} or --lm-eval"
                raise UserError(f"--{option} is for the task of a recipe", fix=fix)
        from lezo_ds.runs.harness import run_tasks

        opened = _open_weights(arguments)
        scores = run_tasks(opened, arguments.lm_eval, arguments.limit)
        summary = scores.pop("table", "")  # ranks but 0 have neither
    else:
        if arguments.limit is not None:
            raise UserError("--limit is for --lm-eval", fix="set data.num_test=N")
        if arguments.out:
            if arguments.split != "test":
                raise UserError("--out writes scores of test examples", fix="remove --split")
            from lezo_ds.runs.export import refuse_taken

            refuse_taken(arguments.out)
        opened = _open_weights(arguments, needs_task=True)
        from lezo_ds.runs.opening import score
        from lezo_ds.runs.screen import scores_summary

        scores = score(opened, arguments.split, arguments.out)
        summary = scores_summary(scores)
    if launched_rank() == 0:
        print(json.dumps(scores, indent=1) if arguments.json else summary)


def _predict(parser: _Parser) -> None:
    """Label or answer the records of a file.

    lezo-ds predict --model EXPORT new.csv --out labels.csv

    The output adds `predicted` (the label, choice or answer) and the `probability` of a label or
    choice. The task comes from the run or export, or from a recipe or keys. If the command is
    killed, running it again continues where it stopped.
    """
    add = _add_weights(parser)
    add(
        "--out",
        type=_path,
        metavar="FILE",
        required=True,
        help="output file, of the same type as DATA",
    )
    add("data", metavar="DATA", help="records: .csv, .tsv, .json, .jsonl or .parquet")
    add(
        "--probabilities",
        action="store_true",
        help="also write the probability of each label, as probability_LABEL",
    )
    add(
        "--threshold",
        type=_share,
        default=0.0,
        metavar="P",
        help="leave `predicted` empty where the probability of the label is below P",
    )
    parser.add_keys()


def run_predict(arguments: argparse.Namespace) -> None:
    opened = _open_weights(arguments, needs_task=True)
    from lezo_ds.runs.predict import predict_file

    num_records = predict_file(
        opened,
        arguments.data,
        arguments.out,
        probabilities=arguments.probabilities,
        threshold=arguments.threshold,
    )
    if launched_rank() == 0:
        print(f"{num_records} records: {arguments.out}")


def _chat(parser: _Parser) -> None:
    """Chat with a model, using its chat template.

    lezo-ds chat --model EXPORT
    lezo-ds chat --run DIR --step last data.system_prompt="Be brief." generation.temperature=0.7

    Each input line is a turn, and the model sees all previous turns. An empty line or the end of
    the input ends the chat. By default, an answer uses the most probable tokens, 512 at most,
    regardless of the recipe; generation keys change this.
    """
    _add_weights(parser)
    parser.add_keys()


def run_chat(arguments: argparse.Namespace) -> None:
    from lezo_ds import distributed
    from lezo_ds.runs.chat import CHAT_KEYS, chat

    distributed.init_distributed(_CHAT_SECONDS)
    chat(_open_weights(arguments, *CHAT_KEYS))


def _export(parser: _Parser) -> None:
    """Write the model at any step of a run, or a run as one small file.

    lezo-ds export --run DIR --step best --out DIR [key=value ...]
    lezo-ds export --run DIR --journal FILE
    lezo-ds export --journal FILE --step best --out DIR model.path=BASE_MODEL
    """
    add = parser.add_argument
    add("--run", type=_path, help="directory of the run")
    add("--journal", type=_path, help="a run as a file: written with --run, otherwise read")
    add("--step", default=_BEST, help="best (lowest validation loss), last, or a number")
    add("--out", type=_path, help="output directory")
    add(
        "--merge",
        action="store_true",
        help="with --out: merge a LoRA adapter into its base model, and write all weights",
    )
    parser.add_keys()


def run_export(arguments: argparse.Namespace) -> None:
    if [arguments.run, arguments.journal, arguments.out].count(None) != 1:
        raise UserError(
            "export needs two of --run, --journal and --out", fix="see lezo-ds export --help"
        )
    from lezo_ds.runs.export import export_run, write_journal

    if arguments.out is None:
        if arguments.merge or arguments.overrides or arguments.step != _BEST:
            raise UserError(
                "--step, --merge and keys are for --out: a journal has all steps", fix="remove them"
            )
        if _is_left_to_rank_zero("export --journal"):
            return
        num_bytes = write_journal(arguments.run, arguments.journal)
        print(f"{arguments.run}: {arguments.journal}, {num_bytes:,} bytes")
        return
    source = arguments.run or arguments.journal
    step = export_run(
        source,
        arguments.step,
        arguments.out,
        arguments.overrides,
        merge=arguments.merge,
    )
    if launched_rank() == 0:
        print(f"step {step} of {source}: {arguments.out}")
        print(f"To share it: hf upload OWNER/NAME {shlex.quote(str(arguments.out))}")


def _fit_head(parser: _Parser) -> None:
    """Fit the output head to labels, and nothing else (linear probing).

    lezo-ds fit-head --run DIR --out DIR
    lezo-ds fit-head --model DIR --config RECIPE --out DIR

    The model reads each example once, and the head is fitted to the training examples. Each label
    must be one token. It writes the whole model, which evaluate, predict and train open.
    """
    add = _add_weights(parser)
    add("--out", type=_path, metavar="DIR", required=True, help="output directory")
    parser.add_keys()


def run_fit_head(arguments: argparse.Namespace) -> None:
    opened = _open_weights(arguments, needs_task=True)
    from lezo_ds.runs.fit_head import fit_head

    metric, scores = fit_head(opened, arguments.out)
    if launched_rank() == 0:
        for split, found in scores.items():
            print(
                f"{metric} on {found.num_examples} {split} examples: {found.before:.3f} -> "
                f"{found.after:.3f}, loss {found.loss_before:.3f} -> {found.loss_after:.3f}"
            )
        print(f"The model with the fitted head: {arguments.out}")


def _report(parser: _Parser) -> None:
    """Show runs as a table, averaged over seeds, or as a page with curves.

    lezo-ds report runs/* --html runs.html
    lezo-ds report runs/a runs/b

    Two finished runs on the same test examples are compared. The page has the tables, curves and
    wrong answers.
    """
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        type=_name,
        metavar="RUN",
        help="directory of a run",
    )
    add("--html", type=_path, metavar="FILE", help="write a page instead of a table")
    add("--json", action="store_true", help="print the numbers as JSON instead of a table")


def _init(parser: _Parser) -> None:
    """Inspect a model and your own data file, and write a commented recipe for them.

    lezo-ds init models/smollm2 tickets.csv --text body --label topic --out recipe.yaml
    lezo-ds init models/smollm2 prompts.jsonl --reward rewards:brevity

    DATA is a .csv, .tsv, .json, .jsonl or .parquet file, or OWNER/NAME:SPLIT on the Hub. A column
    is taken without an option only if it alone can be it. An instruct model uses its chat template.
    """
    add = parser.add_argument
    add("model", type=_name, metavar="MODEL", help="directory of a model, or its Hub id")
    add("data", type=_name, metavar="DATA", help="file of records, or a split on the Hub")
    add(
        "--out",
        type=_path,
        default=Path("recipe.yaml"),
        metavar="FILE",
        help="output recipe (default: recipe.yaml)",
    )
    add("--encoding", help="encoding of a .csv or .tsv file (default: found, UTF-8 first)")
    add("--separator", help="what separates the values of a .csv or .tsv file (default: found)")
    add("--text", metavar="COLUMN", help="the column that the model reads")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--label", metavar="COLUMN", help="the column with the correct label")
    target.add_argument("--answer", metavar="COLUMN", help="the column with the text to write")
    target.add_argument("--messages", metavar="COLUMN", help="the column with conversations")
    target.add_argument(
        "--reward",
        type=_code,
        metavar="MODULE:FUNCTION",
        help="function that scores answers; its module may be in the recipe's folder",
    )
    add(
        "--drop-label",
        action="append",
        default=[],
        metavar="LABEL",
        help="leave out the records with this label; may be repeated",
    )
    add(
        "--label-map",
        type=_pair,
        action="append",
        default=[],
        metavar="LABEL=OTHER",
        help="count a label as another; may be repeated",
    )
    add(
        "--method",
        choices=("evolution-strategies", "fzoo", "lezo", "mezo"),
        help="training method (default: evolution-strategies for labels, choices and rewards, "
        "fzoo for texts)",
    )


COMMANDS: dict[str, tuple[Callable[[_Parser], None], str]] = {
    "init": (_init, "lezo_ds.tools.init:main"),
    "train": (_train, "lezo_ds.cli:run_train"),
    "evaluate": (_evaluate, "lezo_ds.cli:run_evaluate"),
    "predict": (_predict, "lezo_ds.cli:run_predict"),
    "chat": (_chat, "lezo_ds.cli:run_chat"),
    "export": (_export, "lezo_ds.cli:run_export"),
    "fit-head": (_fit_head, "lezo_ds.cli:run_fit_head"),
    "report": (_report, "lezo_ds.tools.report:main"),
}
"""For each command, the function that adds its arguments to a parser, and `module:name` of the
function that takes the parsed arguments. The module is imported when the command runs."""

_OF_ONE_RANK = {"init", "report"}
"""Commands that ranks do not run together, because each rank would write the same files."""


def _is_left_to_rank_zero(command: str) -> bool:
    """Return whether a one-rank command is left to rank 0, and print this."""
    rank = launched_rank()
    if rank > 0:
        print(f"rank {rank} leaves lezo-ds {command} to rank 0", file=sys.stderr)
    return rank > 0


def run_command(name: str, words: Sequence[str] | None = None) -> None:
    """Run a command with the words of its command line, by default those in `sys.argv`."""
    add_arguments, function = COMMANDS[name]
    description = inspect.getdoc(add_arguments) or ""
    words = sys.argv[1:] if words is None else words
    if name == "train" and "--help" in words:
        sections = [word for word in words if word in SECTIONS]
        if sections:
            print(describe(sections[0]))
            return
        description += f"\n\nKeys:\n{describe()}"
    parser = _Parser(name, description)
    add_arguments(parser)
    arguments = parser.parse_intermixed_args(words)  # options and keys may alternate
    if name == "predict":  # keys may come before DATA
        words = [arguments.data, *arguments.overrides]
        words.sort(key=lambda word: key_of(word) in KEYS)
        arguments.data = _path(words[0])
        arguments.overrides = words[1:]
    for word in getattr(arguments, "overrides", ()):
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            raise UserError(f"{word} is not key=value", fix=f"lezo-ds {name} --config {word}")
    if name in _OF_ONE_RANK:
        if _is_left_to_rank_zero(name):
            return
        forget_launcher()
    pkgutil.resolve_name(function)(arguments)


def main(command: str | None = None) -> None:
    """Run a command, by default the one named by the first argument, and end the process."""
    end_process_after(_run_program if command is None else partial(run_command, command))


def end_process_after(work: Callable[[], None]) -> NoReturn:
    """Do the work of a process, and exit with the code of its outcome."""
    _prepare_process()
    try:
        work()
    except LezoError as error:
        end_with(error)
    except (RuntimeError, MemoryError) as error:
        # A command that did not need torch has not imported this module.
        distributed = sys.modules.get("lezo_ds.distributed")
        known = None
        if distributed is not None:
            known = distributed.lost_rank(error) or distributed.out_of_memory(error)
        if known is None:
            raise
        end_with(known)
    except OSError as error:
        if error.errno not in _UNUSABLE:
            raise
        path = cut(str(error.filename or "a disk"), 100)
        fix = "correct this path in the arguments or the recipe, permit its use, or free space on "
        fix += "its disk and that of TMPDIR"
        end_with(UserError(f"{path} cannot be used: {error.strerror}", fix=fix))
    if "lezo_ds.distributed" in sys.modules:
        sys.modules["lezo_ds.distributed"].shut_down()
    # At a normal exit, a thread of gloo may abort (torch 2.13, PyTorch pull request 179291). What
    # comes before: the user's executors stop their workers, and then exit functions run.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    leave(0)


def _prepare_process() -> None:
    """Limit library output to what concerns the user."""
    # Otherwise a lost rank is 30 lines of a C++ stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("RUST_LOG", "error")  # torchft reads it once
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "20")  # each state of a bar is a line in a log
    sys.stdout = _Screen(sys.stdout, has_bars=False)
    sys.stderr = _Screen(sys.stderr, has_bars=True)
    level = logging.INFO if launched_rank() == 0 else logging.ERROR
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    handler.addFilter(_Once())
    logging.basicConfig(level=level, handlers=[handler])
    for noisy in ("accelerate", "DeepSpeed", "httpx", "datasets", "lm_eval", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # DeepSpeed sets its logger's level, and a handler, when it is imported.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def _run_program() -> None:
    lines = ["Fine-tune language models without gradients, on DeepSpeed. Commands:", ""]
    for name, (add_arguments, _) in COMMANDS.items():
        summary = (inspect.getdoc(add_arguments) or "").partition("\n")[0]
        lines.append(f"  {name:10} {summary}")
    parser = _Parser("", "\n".join([*lines, "", "Each command has a --help."]))
    add = parser.add_argument
    add("--version", action="version", version=f"lezo_ds {__version__}")
    add(
        "--path",
        metavar="FILE",
        help="print the path of a shipped file, such as launch/slurm/one_node.sbatch",
    )
    add("command", nargs="?", metavar="COMMAND", help="one of the commands above")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="the arguments of the command")
    arguments = parser.parse_args()
    name = arguments.command
    if arguments.path is not None:
        path = find_file(arguments.path)
        if not path.exists():
            raise UserError(
                f"{arguments.path} is not a file of the package", fix="see lezo-ds --path launch"
            )
        print(path.resolve())
    elif name is None:
        parser.print_help()
    elif name in COMMANDS:
        run_command(name, arguments.arguments)
    else:
        fix = did_you_mean(name, COMMANDS, "see lezo-ds --help")
        raise UserError(f"{name} is not one of {', '.join(COMMANDS)}", fix=fix)


class _Output(io.FileIO):
    """Drops output whose reader has closed the pipe, as in `train.py ... | head -1`."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


class _Screen(io.TextIOWrapper):
    """A standard stream of this process, whose text may quote an untrusted run or model."""

    def __init__(self, stream: TextIO, *, has_bars: bool) -> None:
        stream.flush()
        buffer = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
        super().__init__(buffer, stream.encoding, stream.errors, line_buffering=True)
        self._has_bars = has_bars

    def write(self, text: str) -> int:
        shown = text
        if self._has_bars and not self.isatty():
            shown = text.replace("\r", "\n")
        super().write(printable(shown, has_bars=self._has_bars))
        return len(text)


class _Once(logging.Filter):
    """Shows each message about data once, although a command may read the data several times."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("lezo_ds.data"):
            return True
        message = record.getMessage()
        is_new = message not in self._said
        self._said.add(message)
        return is_new


class _Formatter(logging.Formatter):
    """Formats the message of a log line, which has no progress bars."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
