"""Whether a tokenizer reads texts as its tokenizer.json says.

transformers builds some tokenizers by the class that tokenizer_config.json names, and takes only the
vocabulary from tokenizer.json. A class that does not belong to it then changes the tokens of texts,
and a model that was trained with others gets worse without an error.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE

logger = logging.getLogger(__name__)

_TEXTS = (
    "Hello World! It's 2024-11-28, isn't it?",
    " leading and  double  spaces ",
    "def f(x):\n\treturn x_1 + 1234567\n\n",
    "Größe, naïve café: 你好，世界 ½ 🙂",
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
            expected = alone.encode(text, add_special_tokens=with_ends).tokens
            found = tokenizer.tokenize(text, add_special_tokens=with_ends)
            if found != expected:
                logger.warning(
                    "%s: %s reads %r as %s, and tokenizer.json as %s. Use the tokenizer_class in "
                    "tokenizer_config.json with which the model was trained",
                    directory,
                    type(tokenizer).__name__,
                    text,
                    found,
                    expected,
                )
                return


def begins_twice(tokenizer: Any, prompt: str, begin_ids: tuple[int, ...]) -> bool:
    """Return whether a prompt begins with a token that begins every text anyway, such as <s>.

    Args:
        tokenizer: that of transformers.
        prompt: as a recipe writes it, such as "<s>{text} Label:".
        begin_ids: the tokens that are put before every text.
    """
    ids = tokenizer.encode(prompt.lstrip(), add_special_tokens=False)
    return bool(begin_ids) and ids[:1] in ([begin_ids[0]], [begin_ids[-1]])
