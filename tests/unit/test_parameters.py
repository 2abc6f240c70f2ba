from __future__ import annotations

import random

from lezo_ds.sharding import parameters
from lezo_ds.sharding.parameters import parameter_ids, table_hash

NAMES = [f"model.decoder.layers.{index}.{part}.weight" for index in range(48) for part in ("fc1", "fc2", "q")]


def test_ids_are_the_recorded_ones():
    ids = parameter_ids(["model.decoder.embed_tokens.weight", "model.decoder.layers.0.fc1.bias"])
    assert ids == {
        "model.decoder.embed_tokens.weight": 270094208,
        "model.decoder.layers.0.fc1.bias": 128067829,
    }


def test_ids_depend_neither_on_the_order_nor_on_the_other_names():
    shuffled = random.Random(0).sample(NAMES, len(NAMES))
    assert parameter_ids(shuffled) == parameter_ids(NAMES)
    assert parameter_ids(NAMES[:5]) == {name: parameter_ids(NAMES)[name] for name in NAMES[:5]}


def colliding_names():
    """Two names with the same 32-bit hash: by the birthday bound among about 80,000."""
    seen = {}
    for index in range(10**6):
        name = f"layers.{index}.weight"
        value = parameters._hash32(name)
        if value in seen:
            return seen[value], name
        seen[value] = name
    raise AssertionError("no collision found")


def test_names_with_the_same_hash_get_different_ids_in_any_order():
    pair = colliding_names()
    ids = parameter_ids([*pair, "other"])
    assert len(set(ids.values())) == 3
    assert ids == parameter_ids(["other", *reversed(pair)])
    first = min(pair)
    assert ids[first] == parameter_ids([first])[first]


def test_the_table_hash_is_the_recorded_one_in_any_order():
    assert table_hash({"a": (2, 3), "b": (4,)}) == "b4e39c3ccfb607d134e09c2f9846e467"
    assert table_hash({"b": (4,), "a": (2, 3)}) == "b4e39c3ccfb607d134e09c2f9846e467"


def test_the_table_hash_sees_every_name_and_shape():
    tables = [
        {"a": (2, 3), "b": (4,)},
        {"a": (3, 2), "b": (4,)},
        {"a": (6,), "b": (4,)},
        {"a": (2, 3), "c": (4,)},
        {"a": (2, 3)},
        {"a": (2, 3), "b": (4,), "c": ()},
        {},
    ]
    assert len({table_hash(table) for table in tables}) == len(tables)
