"""Whether a tokenizer reads texts as its tokenizer.json says.

transformers builds some tokenizers by the class that tokenizer_config.json names, and takes only
the vocabulary from tokenizer.json. A class that does not belong to it then changes the tokens of
texts, and a model that was trained with others gets worse without an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE

from lezo_ds.errors import UserError

logger = logging.getLogger(__name__)

_TEXTS = (
    "Hello World!",
    "it's 12345.67, isn't it?",
    " two  spaces ",
    "f(x_1):\n\treturn\n\n",
    "Größe, café ½",
    "你好 世界 🙂",
)
_OWN_ENDS = ("add_bos_token", "add_eos_token")
"""Keys of tokenizer_config.json that say which tokens begin and end a text."""


def warn_of_other_tokens(directory: Path, tokenizer: Any) -> None:
    """Log the first text that a tokenizer reads otherwise than its tokenizer.json alone.

    Args:
        directory: of the model. Without a tokenizer.json there is nothing to compare with.
        tokenizer: that of transformers, which was loaded from the directory.
    """
    file = directory / FULL_TOKENIZER_FILE
    if not file.is_file():
        return
    alone = Tokenizer.from_file(str(file))
    alone.no_padding()
    alone.no_truncation()
    named = tokenizer.init_kwargs
    for with_ends in (False, True):
        if with_ends and any(named.get(key) is not None for key in _OWN_ENDS):
            continue  # tokenizer_config.json says it, and not the class
        for text in _TEXTS:
            expected = alone.encode(text, add_special_tokens=with_ends)
            found = tokenizer(text, add_special_tokens=with_ends)["input_ids"]
            if found != expected.ids:
                logger.warning(
                    "%s: %s reads %r as %s, and tokenizer.json as %s. Use the tokenizer_class in "
                    "tokenizer_config.json with which the model was trained",
                    directory,
                    type(tokenizer).__name__,
                    text,
                    tokenizer.convert_ids_to_tokens(found),
                    expected.tokens,
                )
                return


def refuse_second_begin(tokenizer: Any, prompt: str, begin_ids: Sequence[int]) -> None:
    """Refuse a prompt that begins with a token that begins every text anyway, such as <s>.

    Args:
        tokenizer: that of transformers.
        prompt: as a recipe writes it, such as "<s>{text} Label:".
        begin_ids: the tokens that are put before every text.
    """
    ids = tokenizer.encode(prompt.lstrip(), add_special_tokens=False)
    if begin_ids and ids and ids[0] in (*begin_ids, tokenizer.bos_token_id):
        begin = tokenizer.decode(ids[:1])
        raise UserError(
            f"data.prompt begins with {begin}, and the tokenizer already puts "
            f"{tokenizer.decode(list(begin_ids))} before each text",
            fix=f"remove {begin} from data.prompt",
        )
