"""A user's own data: a CSV file of support tickets in three classes, and a tiny model of bytes."""

from __future__ import annotations

import csv
import os
import random

from assets import REPOSITORY, SPECIAL_TOKENS
from tiny_runs import write_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import OPTConfig, PreTrainedTokenizerFast

SUBJECTS = {
    "billing": ("I was charged twice", "My invoice is wrong", "The refund, as promised, is missing"),
    "bug": ("The app crashes on start", 'The page says "error 500"', "Login fails\nsince Monday"),
    "shipping": ("My parcel is late", "The box arrived open", "Where is my order"),
}
VERBALIZERS = {"billing": "an invoice", "bug": "a fault in the program", "shipping": "delivery"}


def path_with(directory):
    """Return a PYTHONPATH with this package and a folder of the user's own modules."""
    return f"{REPOSITORY}{os.pathsep}{directory}"


def write_tickets(path, num_rows=300):
    """Write tickets with a header, quoted commas, quotes and line breaks, as a spreadsheet does."""
    rng = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "topic"])
        for number in range(num_rows):
            topic = rng.choice(sorted(SUBJECTS))
            writer.writerow([number, f"{rng.choice(SUBJECTS[topic])} ({number:03})", topic])
    return path


OPT = OPTConfig(
    hidden_size=16,
    word_embed_proj_dim=16,
    ffn_dim=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)


def write_byte_model(directory, seed=0, config=OPT):
    """Write a random model, such as an OPT of 2 blocks x 16, whose tokens are bytes: any text has tokens."""
    words = (*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    split_all = pre_tokenizers.Split("", "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([byte_level, split_all])
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(directory)
    special = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "vocab_size": len(words)}
    config = type(config)(**{**config.to_dict(), **special})
    return write_model(config, directory, seed=seed)


def own_values(model, **data):
    """Return a recipe of 8 steps, evaluated every 4, on the data that is given."""
    return {
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"max_length": 256, **data},
        "zo": {"learning_rate": 1e-3, "sparsity": 0.5},
        "train": {"steps": 8, "batch_size": 8, "micro_batch_size": 4, "eval_batch_size": 32, "eval_every": 4},
        "deepspeed": str(REPOSITORY / "ds_configs" / "zero3_cpu.json"),
    }
