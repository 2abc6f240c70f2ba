"""A user's own data: support tickets as CSV, conversations, and a tiny model of bytes."""

import csv
import random

from assets import recipe_values, sizes_of, tokenizer_of, write_records
from tiny_runs import write_model
from tokenizers import decoders, pre_tokenizers
from transformers import OPTConfig

from lezo_ds.config import config_from_dict
from lezo_ds.data.task_data import load_task_data

SUBJECTS = {
    "billing": (
        "I was charged twice",
        "My invoice is wrong",
        "The refund, as promised, is missing",
    ),
    "bug": ("The app crashes on start", 'The page says "error 500"', "Login fails\nsince Monday"),
    "shipping": ("My parcel is late", "The box arrived open", "Where is my order"),
}
VERBALIZERS = {"billing": "an invoice", "bug": "a fault in the program", "shipping": "delivery"}


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


def write_byte_model(directory, num_blocks=2, num_positions=256, added_words=()):
    """Write a random OPT of blocks x 16 whose tokens are bytes, and some words."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Sequence([byte_level, pre_tokenizers.Split("", "isolated")])
    tokenizer = tokenizer_of(words, split, decoders.ByteLevel(), adds_bos=False)
    tokenizer.add_tokens(list(added_words))
    tokenizer.save_pretrained(directory)
    sizes = sizes_of(tokenizer, num_blocks, num_positions)
    return write_model(OPTConfig(**sizes, word_embed_proj_dim=16, ffn_dim=32), directory)


def own_values(model, **data):
    """Return a recipe of 8 steps, evaluated every 4."""
    values = recipe_values(model, "")
    values["data"] = {"max_length": 256, **data}
    values["train"] |= {"micro_batch_size": 4, "eval_batch_size": 32}
    return values


def own_config(model, path, *overrides, **data):
    """Return the configuration of a run on a file of records, with words of a command."""
    values = own_values(model, train=str(path), **data)
    return config_from_dict({**values, "run_dir": "none"}, "the test", overrides)


def load_own(model, path, *overrides, **data):
    """Return the data of such a run."""
    return load_task_data(own_config(model, path, *overrides, **data))


_OPENING = "{{ '<s>' + turn['role'] + '\n' }}"
_GENERATION_PROMPT = "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"

PLAIN = (
    "{% for turn in messages %}"
    + _OPENING
    + "{{ turn['content'] + '</s>\n' }}{% endfor %}"
    + _GENERATION_PROMPT
)
"""A template as that of SmolLM2: each turn stays the same, whatever follows it."""

MARKED = (
    "{% for turn in messages %}"
    + _OPENING
    + "{% if turn['role'] == 'assistant' %}"
    + "{% generation %}{{ turn['content'] + '</s>' }}{% endgeneration %}"
    + "{% else %}{{ turn['content'] + '</s>' }}{% endif %}{{ '\n' }}{% endfor %}"
    + _GENERATION_PROMPT
)
"""The same texts, from a template that marks what the assistant writes."""

THINKING = (
    "{% for turn in messages %}"
    + _OPENING
    + "{% if turn['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    + "{{ turn['content'].split('</think>')[-1] + '</s>\n' }}{% endfor %}"
    + _GENERATION_PROMPT
)
"""A template as that of Qwen3: only the last turn has thoughts, so a turn changes when others
follow it."""

SWITCHED = THINKING.replace(
    "<s>assistant\n' }}",
    "<s>assistant\n' }}{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
"""The same, with Qwen3's switch for thoughts."""

WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
)
"""A template as that of Gemma."""
NEEDS_SYSTEM = WITHOUT_SYSTEM.replace("==", "!=")

COLORS = ("red", "green", "blue", "white")


def write_chat_model(directory, template=PLAIN, **sizes):
    """Write a random OPT whose tokens are bytes, with a chat template if one is given."""
    write_byte_model(directory, **sizes)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def conversation(number):
    """Return a conversation of four turns, the last of which names a color."""
    first = [("user", f"Box {number}?"), ("assistant", "Yes.")]
    turns = [*first, ("user", "Its color?"), ("assistant", COLORS[number % len(COLORS)])]
    return [{"role": role, "content": content} for role, content in turns]


def write_conversations(path, num_records=40):
    write_records(path, [{"id": n, "turns": conversation(n)} for n in range(num_records)])
    return path
