"""Replays a journal of directions of low rank in fp32: docs/file-formats.md in NumPy, alone.

It shares no code with the package. Settings: all weights, fp32, normal entries.
"""

# ruff: noqa: N802, N806 (the names are those of the page)

import json
import math
import re
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

f32, u32, u64 = np.float32, np.uint32, np.uint64


def H(text, size):
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest(), "little")


def words(key, parameter_id, block, stream):
    """The words w0 to w3 of each block: uint32 [4, blocks]."""
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    c0, c1 = (block & u64(0xFFFFFFFF)), (block >> u64(32))
    c2, c3 = np.full_like(block, parameter_id), np.full_like(block, stream)
    low = u64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c0 * u64(0xD2511F53), c2 * u64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> u64(32)) ^ c1 ^ u64(k0),
            p1 & low,
            (p0 >> u64(32)) ^ c3 ^ u64(k1),
            p0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3]).astype(u32)


def L(w):
    n = (2 * (w >> u32(9)) + u32(1)).astype(f32)
    bits = n.view(u32)
    m = ((bits & u32(0x7FFFFF)) | u32(0x3F800000)).view(f32)
    e = (bits >> u32(23)).astype(np.int32) - 127 - 24
    halved = m > f32(1.4142135381698608)
    m = np.where(halved, m * f32(0.5), m)
    e = np.where(halved, e + 1, e).astype(f32)
    x = m - f32(1)
    q = x * x
    P = x * f32(7.0376836292e-2) + f32(-1.1514610310e-1)
    for c in (
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        P = P * x + f32(c)
    t = P * x * q + e * f32(-2.12194440e-4) - q * f32(0.5)
    return ((x + t) + e * f32(0.693359375)) * f32(-2)


def sin_cos(w):
    r = w >> u32(30)
    x = (w << u32(2)).view(np.int32).astype(f32) * f32(3.657291987e-10)
    q = x * x
    S = ((q * f32(-1.9515295891e-4) + f32(8.3321608736e-3)) * q + f32(-1.6666654611e-1)) * q * x + x
    C = (q * f32(2.443315711809948e-5) + f32(-1.388731625493765e-3)) * q + f32(4.166664568298827e-2)
    C = C * (q * q) - q * f32(0.5) + f32(1)
    return np.choose(r, [S, C, -S, -C]), np.choose(r, [C, -S, -C, S])


def z(key, parameter_id, first, count):
    """The normals of elements first to first + count - 1."""
    blocks = np.arange(first // 4, (first + count + 3) // 4, dtype=u64)
    w0, w1, w2, w3 = words(key, parameter_id, blocks, 0)
    (sin1, cos1), (sin3, cos3) = sin_cos(w1), sin_cos(w3)
    r0, r2 = np.sqrt(L(w0)), np.sqrt(L(w2))
    drawn = np.stack([r0 * cos1, r0 * sin1, r2 * cos3, r2 * sin3], axis=1).reshape(-1)
    return drawn[first % 4 :][:count]


def replay(journal, base, out):
    header, *lines = map(json.loads, Path(journal).read_text().splitlines())
    assert (header["format"], header["noise_version"]) == (1, 1)
    zo = header["config"]["zo"]
    rank = zo["noise_rank"]
    theta = load_file(base)
    for line in lines:
        if line["kind"] != "step" or line.get("applied") is False:
            continue
        gradients = line["gradients"]
        share = line["lr"] / len(gradients)
        for name, weights in theta.items():
            found = re.search(r"layers\.(\d+)\.", name)
            if found is None or weights.ndim != 2 or int(found[1]) in line["dropped"]:
                continue
            m, n = weights.shape
            parameter_id = H(name, 4)
            factor = f32(1 - line["lr"] * zo["weight_decay"])
            delta = np.zeros((m, n), f32)
            for d, gradient in enumerate(gradients):
                coefficient = share * gradient
                if coefficient == 0:
                    continue
                key = line["key"] if d == 0 else H(f"lezo_ds direction 1|{line['key']}|{d}", 8)
                c = f32(coefficient / math.sqrt(rank))
                for s in range(rank):
                    a = z(key, parameter_id, s * m, m)
                    b = z(key, parameter_id, 2**39 + s * n, n)
                    delta = delta + (c * a)[:, None] * b
            theta[name] = weights * factor - delta
    save_file(theta, out)


if __name__ == "__main__":
    replay(*sys.argv[1:])
