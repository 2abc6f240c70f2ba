"""Models in a GGUF file, as Hugging Face directories, which can be trained."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from lezo_ds.errors import UserError


def convert_gguf(file: Path | str, directory: Path | str) -> None:
    """Write a model in GGUF to a directory: float32 safetensors, configuration and tokenizer.

    Quantized weights are de-quantized, so the model is a little worse than the one they were made from. The
    whole model is in memory twice, in float32.

    Args:
        file: a GGUF file of an architecture that transformers reads.
        directory: where to write the model. It is made if it is not there.

    Raises:
        UserError: there is no such file, it cannot be read, or the package gguf is not installed.
    """
    file = Path(file)
    if find_spec("gguf") is None:
        raise UserError(
            f"{file} cannot be read",
            got="no package gguf",
            expected="the package with which transformers reads such files",
            fix="pip install 'lezo_ds[demo]' (for the demonstration, 'make demo' installs it)",
        )
    transformers_logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except Exception as error:  # transformers and gguf raise many unrelated types here
        raise UserError(
            f"{file} cannot be read",
            got=" ".join(f"{type(error).__name__}: {error}".split()),
            expected="a GGUF file of an architecture that transformers reads",
            fix="download the model in safetensors instead",
        ) from error
    # The model that was read still says that it is quantized, and cannot be saved. A plain one can.
    values = read.config.to_dict()
    values.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(read.config)(**values))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
