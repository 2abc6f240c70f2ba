# An image with lezo_ds and the exact versions in constraints.txt, for Docker, Podman, Apptainer and enroot.
# docs/clusters.md says how to build it, how Slurm runs it, and how it was tried.
#
#   docker build --tag lezo_ds .
FROM python:3.11-slim-bookworm

# Triton, and the noise kernels for CPUs, are compiled at the first run. The security updates of g++ are welcome.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# torch brings the CUDA libraries that belong to it. They are all that is not pinned.
WORKDIR /usr/src/lezo_ds
COPY README.md LICENSE setup.py pyproject.toml constraints.txt ./
COPY ds_configs ds_configs
COPY launch launch
COPY lezo_ds lezo_ds
RUN pip install --no-cache-dir --constraint constraints.txt ".[demo,mpi,report,tensorboard]" && rm -rf build

# enroot and NVIDIA's runtime for Docker give a container the GPUs and the driver that these ask for.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Any user may run it: nothing is written in the image. What is compiled or downloaded goes into $HOME/.cache, so
# HOME must be a folder that the user may write.
CMD ["lezo-ds", "--help"]
