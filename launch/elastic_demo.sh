#!/usr/bin/env bash
# Two minutes of replicas that come and go, on two cores and without a GPU. Run it from the root of the repository
# after `make demo` has made .venv and fetched the model:
#
#   .venv/bin/pip install --constraint constraints.txt --editable ".[elastic]"
#   launch/elastic_demo.sh
#
# Three replicas train; one is killed, and another joins. At the end all journals are equal, and a replay on one
# process gives the digest of the weights. Keys of a recipe, such as model.path=DIR, may follow the command.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$launch/environment.sh"
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} OMP_NUM_THREADS=1
run=runs/elastic-demo
rm -rf "$run"
mkdir -p "$run"
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT

torchft_lighthouse --min_replicas 1 --quorum_tick_ms 50 --heartbeat_timeout_ms 1000 \
    --bind 127.0.0.1:29510 2> "$run/lighthouse.log" &

replica() {
    lezo-ds train --config demo-fzoo run_dir="$run" elastic.lighthouse=http://127.0.0.1:29510 train.steps=40 \
        train.eval_every=20 data.num_train=200 data.num_dev=16 data.num_test=16 train.batch_size=4 \
        train.micro_batch_size=4 zo.probes_per_pass=2 train.keep_snapshots=0 \
        "${@:2}" > "$run/$1.log" 2>&1 &
}
reaches() { until [[ $(cat "$run/journal.jsonl" 2> /dev/null | grep -c '"kind":"step"') -ge $1 ]]; do sleep 0.2; done; }

replica one "$@"
ends=($!)
reaches 2
replica two "$@"
ends+=($!)
replica three "$@"
killed=$!
reaches 15
echo "step 15: one of three replicas is killed"
kill -9 "$killed"
wait "$killed" 2> /dev/null || true
reaches 20
echo "step 20: another one joins"
replica four "$@"
wait "${ends[@]}" $!
echo "The journals of the replicas, and the digest of a replay on one process:"
sha256sum "$run"/journal.jsonl "$run"/replicas/*/journal.jsonl
lezo-ds export --run "$run" --out "$run/model" 2>&1 | grep digest
