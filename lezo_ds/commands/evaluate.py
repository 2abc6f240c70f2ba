"""Score a model, or the weights of a run at any step.

lezo-ds evaluate --run DIR --step best
lezo-ds evaluate --model DIR data.task=SST2 data.path=DIR
lezo-ds evaluate --model DIR --config RECIPE
"""

from __future__ import annotations

import json

from lezo_ds import command_line
from lezo_ds.config import check_overrides
from lezo_ds.tools.arguments import path, path_or_name


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("evaluate", __doc__ or "")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=path, metavar="DIR", help="directory of a run")
    model_help = "directory of a model, or its hub id"
    source.add_argument("--model", type=path_or_name, metavar="DIR", help=model_help)
    config_help = "with --model: take everything else, such as a task of your own, from this recipe"
    parser.add_argument("--config", metavar="RECIPE", help=config_help)
    step_help = "step of the run: best (lowest validation loss), last, or a number"
    parser.add_argument("--step", default="best", help=step_help)
    parser.add_argument("--split", choices=("test", "dev"), default="test", help="examples to score")
    parser.add_argument("--predictions", type=path, metavar="FILE", help="write all predictions as JSON")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON instead of a line")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=command_line.KEYS_HELP)
    arguments = command_line.parse_with_keys(parser)
    if arguments.run is not None and arguments.config is not None:
        parser.error("--config goes with --model; a run has its own configuration")
    overrides = tuple(arguments.overrides)
    check_overrides(overrides)

    from lezo_ds import distributed
    from lezo_ds.runs.scoring import score_model, score_run
    from lezo_ds.runs.screen import scores_summary

    if arguments.run is not None:
        scores = score_run(arguments.run, arguments.step, arguments.split, overrides=overrides)
    else:
        scores = score_model(arguments.model, arguments.split, overrides, arguments.config)
    if distributed.rank() == 0:
        if arguments.predictions is not None:
            arguments.predictions.write_text(json.dumps(scores, indent=1) + "\n")
        del scores["predictions"]
        print(json.dumps(scores, indent=1) if arguments.json else scores_summary(scores))
