"""What an unknown key means: a misspelling, or the name of another program or an older release."""

from __future__ import annotations

from lezo_ds.config.schema import KEYS, SECTIONS
from lezo_ds.errors import nearest

# What transformers' TrainingArguments, TRL and MeZO's scripts call a key. A name with a dot counts
# in its section only.
_OURS = {
    "bf16": "model.dtype",
    "data": "data.train",
    "data_seed": "data.seed",
    "dataset": "data.train",
    "early_stopping_patience": "train.patience",
    "epochs": "train.epochs",
    "eps": "zo.perturbation_scale",
    "eval_steps": "train.eval_every",
    "fp16": "model.dtype",
    "generation.max_length": "generation.max_new_tokens",
    "generation.max_tokens": "generation.max_new_tokens",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "load_in_4bit": "model.bits",
    "load_in_8bit": "model.bits",
    "lora_r": "peft.lora_rank",
    "lr": "zo.learning_rate",
    "lr_scheduler_type": "zo.lr_schedule",
    "max_completion_length": "generation.max_new_tokens",
    "max_seq_length": "data.max_length",
    "max_steps": "train.steps",
    "model": "model.path",
    "model_name_or_path": "model.path",
    "num_generations": "generation.num_samples",
    "num_train_epochs": "train.epochs",
    "output_dir": "run_dir",
    "per_device_eval_batch_size": "train.eval_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "save_steps": "train.snapshot_every",
    "save_total_limit": "train.keep_snapshots",
    "stop_strings": "generation.stop",
    "target_modules": "peft.lora_targets",
    "torch_dtype": "model.dtype",
    "train_batch_size": "train.batch_size",
    "warmup_ratio": "zo.warmup_steps",
    "zo_eps": "zo.perturbation_scale",
}

# Names for which there is no key, and why.
_NONE = {
    "adamw": "there is no AdamW here; docs/studies/adamw_reference.py trains with it",
    "class_weights": "remove it: all examples count alike, and train.objective=module:function is "
    "a loss of your own",
    "greater_is_better": "remove it: the best step has the lowest validation loss",
    "group_by_length": "remove it: the examples of each batch are sorted by length",
    "gradient_checkpointing": "remove it: no activation is kept, as there is no backward pass",
    "label_smoothing_factor": "remove it: train.objective=module:function is a loss of your own",
    "load_best_model_at_end": "remove it: lezo-ds export, predict and evaluate take --step best",
    "logging_steps": "remove it: run_dir/metrics.jsonl has every step",
    "max_grad_norm": "remove it: there is no gradient to clip",
    "method": "remove it: a run trains by its zo keys (zo.sparsity=0 is MeZO), and lezo-ds "
    "evaluate scores a model without training it",
    "metric_for_best_model": "remove it: the best step has the lowest validation loss",
    "packing": "remove it: short sequences share rows wherever the model allows it",
    "perturbed_tokens": "remove it: all tokens meet the perturbed weights",
    "resume_from_checkpoint": "remove it: the same command resumes its run",
    "splits": "remove it: splits are stratified",
    "test_size": "remove it: data.test names the test file, or data.num_test its examples",
}


def meant(name: str) -> list[str]:
    """Return the keys that an unknown name means: of other programs, or of its last part."""
    leaf = name.rpartition(".")[2].replace("-", "_")
    ours = _OURS.get(name) or _OURS.get(leaf)
    if ours is not None:
        return [ours]
    return [key for key in KEYS if key.rpartition(".")[2] == leaf]


def fix_of_unknown(name: str) -> str:
    """Return what to write instead of an unknown key."""
    section, _, leaf = name.rpartition(".")
    for known in (leaf, section):
        if known in _NONE:
            return _NONE[known]
    keys = meant(name)
    if not keys and section not in SECTIONS:  # a section that names have in common is no likeness
        keys = nearest(name, [*KEYS, *SECTIONS])
    if not keys:
        keys = nearest(leaf, (key.rpartition(".")[2] for key in KEYS))
        keys = [key for key in KEYS if key.rpartition(".")[2] in keys]
    if keys:
        return f"did you mean {' or '.join(keys)}?"
    shown = f" {section}" if section in SECTIONS else ""
    return f"lezo-ds train --help{shown} lists the keys"
