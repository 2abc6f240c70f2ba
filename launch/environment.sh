# Sourced by batch scripts, from the root of the repository: the environment that make has made there, unless the
# user has activated another.
if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -x .venv/bin/python ]]; then
    export PATH=$PWD/.venv/bin:$PATH
fi
