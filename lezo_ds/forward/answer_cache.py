"""What a model keeps of the tokens that it has read while it writes answers.

Most models keep the keys and values of each token. A recurrence keeps a state, which every token
changes.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

# transformers before 5.23 makes a layer with keys where none are kept.
DummyLayer = getattr(cache_utils, "DummyLayer", DynamicLayer)

_KEYS_AND_VALUES = {DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, DummyLayer}
_STATES = {
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # without types
    """A layer that writes the keys and values of a new token in place.

    transformers' own (5.23) copies those of all tokens for each new one, which takes a fifth of
    the time of short answers. The tensors with room, [rows, heads, room, width], show what is
    written so far:

        keys      k k k k k . . . .        self.keys is the part with "k"
        new               k                written into the first free place
    """

    def __init__(self, num_new_tokens: int) -> None:
        """Make an empty layer. It makes room for `num_new_tokens` more tokens than it needs."""
        super().__init__()
        self._num_new_tokens = num_new_tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens, [rows, heads, tokens, width]; return those of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = self._key_room = key_states[:, :, :0]
            self.values = self._value_room = value_states[:, :, :0]
        self._key_room, self.keys = self._append(self._key_room, self.keys, key_states)
        self._value_room, self.values = self._append(self._value_room, self.values, value_states)
        return self.keys, self.values

    def _append(self, room: Tensor, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Write new states after old ones; return the room in which they are, and all states."""
        old_length = old.shape[2]
        length = old_length + new.shape[2]
        # Methods that select or repeat rows, as `batch_select_indices`, replace the old states.
        if old.data_ptr() != room.data_ptr() or length > room.shape[2]:
            rows, heads, _, width = new.shape
            room = new.new_empty(rows, heads, length + self._num_new_tokens, width)
            room[:, :, :old_length] = old
        room[:, :, old_length:length] = new
        return room, room[:, :, :length]


def answer_cache(model: Any, num_new_tokens: int) -> DynamicCache | None:
    """Return an empty cache of a model that will write answers of at most `num_new_tokens`.

    None if the model keeps something else, which it makes itself.
    """
    if cache_name(model) not in ("cache", "past_key_values"):
        return None
    cache = DynamicCache(config=model.config)
    # Layers of other kinds, such as those of a sliding window, forget tokens.
    cache.layers = [
        RoomyLayer(num_new_tokens) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


def takes_padding(model: Any) -> bool:
    """Return whether padding on the left of a prompt does not change what a model writes.

    The model must locate tokens by position ids, which do not count padding, and hide padding by a
    mask. The recurrences of transformers that have a cache do so.
    """
    if "position_ids" not in _inputs(model) or keeps_states_apart(model):
        return False
    kinds = kinds_of_layers(model.config)
    names = [name for name, _ in model.named_parameters() if "in_proj" in name]
    if kinds & _STATES and any(name.endswith("bias") for name in names):
        return False  # padding is 0 before the projection into a state, which adds a bias to it
    if getattr(model.config.get_text_config(), "attn_temperature_tuning", False):
        return False  # Llama 4's attention gets sharper with the tokens of a row
    return kinds <= _KEYS_AND_VALUES | _STATES


def begins_after_padding(config: Any) -> bool:
    """Return whether positions may not begin at 0: in RoBERTa and its like, after the padding's."""
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def keeps_states_apart(model: Any) -> bool:
    """Return whether a model keeps states that are in no layer of a cache of transformers.

    Such states may be those of other rows than the ones that a pass has, so they are not used.
    """
    keeps_in_modules = model.config.model_type == "recurrent_gemma"
    return keeps_in_modules or not model._supports_default_dynamic_cache()


def cache_name(module: Any) -> str:
    """Return the name by which the forward method of a module gets a cache, or "".

    Each call of the method changes the cache.
    Transformers 5.24 renamed it to "cache". The output of a model has the same name.
    """
    inputs = _inputs(module)
    names = ("cache", "past_key_values", "cache_params")
    return next((name for name in names if name in inputs), "")


def _inputs(module: Any) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


def kinds_of_layers(config: Any) -> set[Any]:
    """Return the classes of the layers in which transformers keeps what a model has read.

    Args:
        config: the model's configuration, of transformers.
    """
    return {type(layer) for layer in DynamicCache(config=config).layers}
