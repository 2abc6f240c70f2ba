"""Replays a run by docs/file-formats.md alone: it imports nothing but NumPy and the standard library.

python tests/helpers/numpy_replay.py RUN_DIR BASE_MODEL SNAPSHOT

rebuilds the weights of a snapshot from the base weights and the run's journal, and counts the tensors that
differ.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

f32, i32, u32, u64 = np.float32, np.int32, np.uint32, np.uint64

# Files.


def read_journal(path):
    """Return the header, and all other whole lines. ValueError if the chain of checksums is broken."""
    *lines, _torn = path.read_bytes().split(b"\n")
    items, previous = [], 0
    for number, line in enumerate(lines, 1):
        body = line[: -len(b',"crc":"00000000"}')] + b"}"
        previous = zlib.crc32(body, previous)
        if line != body[:-1] + b',"crc":"%08x"}' % previous:
            raise ValueError(f"line {number} has another checksum")
        items.append(json.loads(line))
    return items[0], items[1:]


_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I16": "<i2"}


def read_safetensors(path):
    """Return the tensors of a file by name; those of bf16 are the bit patterns as uint16."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, facts in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = facts["data_offsets"]
            values = np.frombuffer(data[start + first : start + last], _TYPES[facts["dtype"]])
            tensors[name] = values.reshape(facts["shape"])
    return tensors


def read_directory(directory):
    """Return the tensors of all safetensors files in a directory; a directory that is missing has none."""
    return {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in read_safetensors(path).items()
    }


# Keys and parameters.


def blake2b(text, size):
    return hashlib.blake2b(text.encode(), digest_size=size)


def number(text, size):
    return int.from_bytes(blake2b(text, size).digest(), "little")


def step_key(seed, step):
    return number(f"lezo_ds noise 1|{seed}|{step}", 8)


def direction_key(key, direction):
    return key if direction == 0 else number(f"lezo_ds direction 1|{key}|{direction}", 8)


def block_order(seed, step, num_blocks):
    return sorted(
        range(num_blocks), key=lambda i: blake2b(f"lezo_ds dropped layers 1|{seed}|{step}|{i}", 16).digest()
    )


def parameter_ids(names):
    ids = {}
    for name in sorted(names):
        attempt, found = 0, number(name, 4)
        while found in ids.values():
            attempt += 1
            found = number(f"{name}#{attempt}", 4)
        ids[name] = found
    return ids


def blocks_of(shapes):
    """Return the block of each parameter, None outside the blocks."""
    places = {name: re.match(r"(.+?)\.(\d+)\.", name) for name in shapes}
    sizes = {}
    for name, place in places.items():
        if place:
            sizes[place[1]] = sizes.get(place[1], 0) + int(np.prod(shapes[name]))
    largest = max(sizes, key=sizes.get)
    return {name: int(at[2]) if at and at[1] == largest else None for name, at in places.items()}


# Noise.


def philox(key, parameter_id, num_words, stream):
    """Return the first `num_words` output words of a parameter's blocks."""
    block = np.arange(-(-num_words // 4), dtype=u64)
    low = u64(0xFFFFFFFF)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    c0, c1, c2, c3 = block & low, block >> u64(32), u64(parameter_id), u64(stream)
    for _ in range(10):
        p0, p1 = c0 * u64(0xD2511F53), c2 * u64(0xCD9E8D57)
        c0, c1, c2, c3 = p1 >> u64(32) ^ c1 ^ u64(k0), p1 & low, p0 >> u64(32) ^ c3 ^ u64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(u32).reshape(-1)[:num_words]


_LOG = (1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1)
_LOG += (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)


def minus_two_log(word):
    bits = (2 * (word >> 9) + 1).astype(f32).view(i32)
    m = ((bits & 0x7FFFFF) | 0x3F800000).view(f32)
    e = (bits >> 23) - 127 - 24
    above = m > f32(1.4142135381698608)
    m, e = np.where(above, m * f32(0.5), m), (e + above).astype(f32)
    x = m - f32(1)
    p = x * f32(7.0376836292e-2) + f32(-1.1514610310e-1)
    for c in _LOG:
        p = p * x + f32(c)
    q = x * x
    tail = p * x * q + e * f32(-2.12194440e-4) - q * f32(0.5)
    return ((x + tail) + e * f32(0.693359375)) * f32(-2)


def sin_cos(word):
    r = word >> 30
    x = (word << 2).view(i32).astype(f32) * f32(3.657291987e-10)
    q = x * x
    s = ((q * f32(-1.9515295891e-4) + f32(8.3321608736e-3)) * q + f32(-1.6666654611e-1)) * q * x + x
    c = (q * f32(2.443315711809948e-5) + f32(-1.388731625493765e-3)) * q + f32(4.166664568298827e-2)
    c = c * (q * q) - q * f32(0.5) + f32(1)
    return np.choose(r, [s, c, -s, -c]), np.choose(r, [c, -s, -c, s])


def normals(key, parameter_id, num_elements):
    words = philox(key, parameter_id, -(-num_elements // 4) * 4, stream=0).reshape(-1, 2)
    radius = np.sqrt(minus_two_log(words[:, 0]))
    sine, cosine = sin_cos(words[:, 1])
    return np.stack([radius * cosine, radius * sine], axis=1).reshape(-1)[:num_elements]


def signs(key, parameter_id, num_elements):
    words = philox(key, parameter_id, -(-num_elements // 32), stream=2)
    bits = words[:, None] >> np.arange(32, dtype=u32) & u32(1)
    return np.where(bits == 1, f32(-1), f32(1)).reshape(-1)[:num_elements]


DISTRIBUTIONS = {"normal": normals, "rademacher": signs}


def dither(key, parameter_id, num_elements):
    return philox(key, parameter_id, num_elements, stream=1)


# How values are stored. What is stored of bf16 is the bit pattern as uint16.


def nearest(values, dtype):
    if dtype == "fp32":
        return values
    if dtype == "fp16":
        return values.astype(np.float16)
    bits = values.view(u32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def stochastic(values, words, dtype):
    if dtype == "fp32":
        return values
    bits = values.view(u32)
    if dtype == "bf16":
        return ((bits + (words & 0xFFFF)) >> 16).astype(np.uint16)
    m = bits & 0x7FFFFFFF
    large = np.minimum((m.astype(np.int64) + (words & 0x1FFF) >> 13) - 0x1C000, 0x7C00)
    small = (np.abs(values).astype(np.float64) * 2.0**44).astype(np.int64) + (words & 0xFFFFF) >> 20
    stored = np.where(m >= 0x38800000, large, small) | (bits >> 31 << 15)
    return stored.astype(np.uint16).view(np.float16)


def to_fp32(stored, dtype):
    return (stored.astype(u32) << 16).view(f32) if dtype == "bf16" else stored.astype(f32)


def split(values, dtype):
    if dtype == "bf16":
        bits = values.view(u32)
        high = (bits + 0x8000) >> 16
        return high.astype(np.uint16), (bits - (high << 16)).astype(np.int16)
    high = values.astype(np.float16)
    low = np.rint((values - high.astype(f32)) / _unit(high))
    return high, np.where(np.isinf(high), 0, low).astype(np.int16)


def join(high, low, dtype):
    if dtype == "bf16":
        return ((high.astype(u32) << 16) + low.astype(u32)).view(f32)
    return high.astype(f32) + low.astype(f32) * _unit(high)


def _unit(high):
    exponent = np.maximum(np.abs(high).astype(f32).view(i32) >> 23, 113)
    return ((exponent - 25) << 23).view(f32)


@dataclass
class Weights:
    """All parameters, flat, as they are stored.

    Attributes:
        dtype: "fp32", "bf16" or "fp16".
        ids: of the parameters, by name.
        shapes: of the parameters, by name.
        high: values by name; for bf16, bit patterns.
        low: low bits by name, of the parameters that have them.
    """

    dtype: str
    ids: dict
    shapes: dict
    high: dict
    low: dict

    def set(self, name, values, *, with_low_bits):
        """Set a parameter to fp32 values."""
        if with_low_bits and self.dtype != "fp32":
            self.high[name], self.low[name] = split(values, self.dtype)
        else:
            self.high[name] = nearest(values, self.dtype)

    def apply(self, name, key, coefficient, factor, precision, distribution):
        """Do one update of one parameter."""
        high, low = self.high[name], self.low.get(name)
        theta = to_fp32(high, self.dtype) if low is None else join(high, low, self.dtype)
        z = DISTRIBUTIONS[distribution](key, self.ids[name], len(theta))
        value = theta * f32(factor) - f32(coefficient) * z
        if precision == "stochastic":
            self.high[name] = stochastic(value, dither(key, self.ids[name], len(theta)), self.dtype)
        else:
            self.set(name, value, with_low_bits=precision == "fp32_master")

    def digest(self, names=None):
        """Return the digest of some parameters, or of all."""
        sums = {name: self._sum(name) for name in sorted(names or self.high)}
        return blake2b(";".join(f"{name}:{total}" for name, total in sums.items()), 16).hexdigest()

    def _sum(self, name):
        total = digest_sum(self.high[name], self.ids[name])
        if name in self.low:
            total += digest_sum(self.low[name], self.ids[name] ^ 0x80000000)
        return (total + 2**63) % 2**64 - 2**63

    def table_hash(self):
        text = "".join(f"{name}{list(self.shapes[name])};" for name in sorted(self.shapes))
        return blake2b(text, 16).hexdigest()


def digest_sum(stored, parameter_id):
    signed = stored.view(i32 if stored.itemsize == 4 else np.int16).astype(np.int64).view(u64)
    n = np.arange(1, len(stored) + 1, dtype=u64) * u64(0x9E3779B97F4A7C15)
    n += u64(parameter_id * 0xC2B2AE3D27D4EB4F % 2**63)
    shifted = (n.view(np.int64) >> 31).view(u64)
    n = (n ^ shifted) * u64(0xBF58476D1CE4E5B9) | u64(1)
    return int((signed * n).sum(dtype=u64))


# The replay.


@dataclass
class Run:
    """A run's journal, and its weights before the first step and after the last one that was replayed.

    Attributes:
        header: of the journal.
        steps: those that were replayed.
        trained: names of the trained parameters.
    """

    header: dict
    steps: list
    trained: list
    first: Weights
    last: Weights

    def fingerprint(self):
        """Return the digest of the model's own parameters before the first step."""
        has_adapter = self.header["config"]["peft"]["kind"] != "none"
        return self.first.digest([n for n in self.first.shapes if not (has_adapter and n in self.trained)])


def replay_run(run_dir, base_model, snapshot=None):
    """Rebuild the weights of a run from its base checkpoint and its journal.

    Args:
        run_dir: directory of the run.
        base_model: directory of the base checkpoint, whose tensors have the names of the parameters.
        snapshot: gives the number of steps, and the names and shapes of what is trained. Without it, all
            steps of a run that trains the whole model are replayed.
    """
    header, records = read_journal(run_dir / "journal.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    base = read_directory(base_model)
    trained = base
    if snapshot is not None:
        steps = steps[: read_manifest(snapshot)["step"]]
        trained = read_snapshot(snapshot)
    has_adapter = header["config"]["peft"]["kind"] != "none"
    frozen = base if has_adapter else {}
    if header["config"]["zo"].get("only_blocks", False):
        blocks = blocks_of({name: tensor.shape for name, tensor in {**trained, **frozen}.items()})
        frozen = {**frozen, **{name: tensor for name, tensor in trained.items() if blocks[name] is None}}
        trained = {name: tensor for name, tensor in trained.items() if blocks[name] is not None}
    first = initial_weights(header["config"], base, trained, frozen)
    at_start = run_dir / "snapshots" / "step-00000000"  # a prefix has one
    for name, tensor in read_snapshot(at_start).items():
        first.high[name] = tensor.reshape(-1)
    for name, tensor in read_directory(at_start / "low_bits").items():
        first.low[name] = tensor.reshape(-1)
    last = replace(first, high=dict(first.high), low=dict(first.low))
    replay(last, trained, header["config"], steps)
    return Run(header, steps, list(trained), first, last)


def read_manifest(snapshot):
    return json.loads((snapshot / "lezo_manifest.json").read_text())


def read_snapshot(snapshot):
    return {name.removeprefix("base_model.model."): t for name, t in read_directory(snapshot).items()}


def differences(run, snapshot):
    """Return the names of a snapshot's tensors, low bits included, that differ from the replayed ones."""
    low_bits = read_directory(snapshot / "low_bits")
    kinds = ((read_snapshot(snapshot), run.last.high), (low_bits, run.last.low))
    found = [n for stored, ours in kinds for n in stored if stored[n].tobytes() != ours[n].tobytes()]
    return found + sorted(low_bits.keys() ^ run.last.low.keys())


def initial_weights(config, base, trained, frozen):
    """Return the weights before the first step.

    Args:
        config: of the journal's header.
        base: tensors of the base checkpoint, by parameter name.
        trained: tensors of the shapes of the trained parameters, by name.
        frozen: those of the others.
    """
    shapes = {name: tensor.shape for name, tensor in {**trained, **frozen}.items()}
    weights = Weights(config["model"]["dtype"], parameter_ids(shapes), shapes, {}, {})
    for name, shape in shapes.items():
        if name in base:
            values = to_fp32(base[name], "bf16" if base[name].dtype == np.uint16 else None).reshape(-1)
        elif name.endswith(".lora_A.weight"):
            key = number(f"lezo_ds adapter 1|{config['seed']}", 8)
            words = philox(key, weights.ids[name], shape[0] * shape[1], stream=0)
            values = ((words >> 8).astype(f32) * f32(2.0**-23) - f32(1)) * f32(shape[1] ** -0.5)
        else:  # LoRA's B, or a prefix, whose values are in the snapshot of step 0
            values = np.zeros(shape, f32).reshape(-1)
        has_low_bits = name in trained and config["zo"]["update_precision"] == "fp32_master"
        weights.set(name, values, with_low_bits=has_low_bits)
    return weights


def replay(weights, trained, config, steps):
    """Do steps of a journal on weights."""
    zo, blocks = config["zo"], blocks_of(weights.shapes)
    distribution = zo.get("noise_distribution", "normal")
    rule, options = zo.get("update_rule", "sgd"), zo.get("update_rule_options", {})
    weight_decay = options.get("weight_decay", 0.01) if rule == "sgd-weight-decay" else 0.0
    momentum, window = (options["momentum"], options["window"]) if rule == "sgd-momentum" else (0.0, 1)
    applied = [step for step in steps if step["applied"]]
    for end in range(1, len(applied) + 1):
        latest = applied[max(0, end - window) : end][::-1]
        for name in trained:
            decays = len(weights.shapes[name]) > 1 and blocks[name] not in latest[0]["dropped_layers"]
            factor = 1 - latest[0]["learning_rate"] * weight_decay if decays else 1.0
            for update in updates_of(latest, blocks[name], factor, momentum):
                weights.apply(name, *update, zo["update_precision"], distribution)


def updates_of(steps, block, factor, momentum):
    """Return what a step does to a parameter: (key, coefficient, factor) in order.

    Args:
        steps: the step itself, and the applied ones before it that count, from the latest.
        block: of the parameter.
        factor: multiplies the parameter.
        momentum: how much less each step counts than the one after it.
    """
    updates, counts = [], 1.0
    for step in steps:
        share = counts * (steps[0]["learning_rate"] / len(step["projected_grads"]))
        counts *= momentum
        for direction, gradient in enumerate(step["projected_grads"]):
            coefficient = share * gradient
            if block is not None and "layer_weights" in step:
                coefficient = coefficient * step["layer_weights"][block]
            if coefficient != 0 and block not in step["dropped_layers"]:
                updates.append((direction_key(step["seed"], direction), coefficient, 1.0))
    if factor != 1:
        key, coefficient, _ = updates[0] if updates else (steps[0]["seed"], 0.0, 1.0)
        updates[:1] = [(key, coefficient, factor)]
    return updates


def main():
    run_dir, base_model, snapshot = map(Path, sys.argv[1:])
    run = replay_run(run_dir, base_model, snapshot)
    found = differences(run, snapshot)
    print(f"{len(found)} of {len(run.trained)} tensors differ; digest {run.last.digest()}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
