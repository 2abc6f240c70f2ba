"""Records of every task with the text that MeZO's protocol makes of them, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Golden:
    """A record in its hub's schema and what becomes of it.

    Attributes:
        task: name of the task.
        record: one row.
        prompt, candidates, label, references, null_prompt: as in Example.
    """

    task: str
    record: dict[str, Any]
    prompt: str
    candidates: tuple[str, ...]
    label: int
    references: tuple[str, ...] = ()
    null_prompt: str | None = ""


GOLDEN = [
    Golden(
        "sst2",
        {"sentence": " a joy to watch ", "label": 1},
        "a joy to watch It was",
        (" terrible", " great"),
        1,
        null_prompt=" It was",
    ),
    Golden(
        "sst2",
        {"sentence": "contains no wit , only labored gags ", "label": 0},
        "contains no wit , only labored gags It was",
        (" terrible", " great"),
        0,
        null_prompt=" It was",
    ),
    Golden(
        "rte",
        {"premise": "It rains.", "hypothesis": "It is wet.", "label": 0, "idx": 3},
        'It rains.\nDoes this mean that "It is wet." is true? Yes or No?\n',
        ("Yes", "No"),
        0,
    ),
    Golden(
        "rte",
        {"premise": "The girl was found in Oslo.", "hypothesis": "Oslo contains a girl", "label": 1},
        'The girl was found in Oslo.\nDoes this mean that "Oslo contains a girl" is true? Yes or No?\n',
        ("Yes", "No"),
        1,
    ),
    Golden(
        "cb",
        {"premise": "He said it rains.", "hypothesis": "it rains", "label": 2, "idx": 0},
        'Suppose He said it rains. Can we infer that "it rains"? Yes, No, or Maybe?\n',
        ("Yes", "No", "Maybe"),
        2,
    ),
    Golden(
        "cb",
        {"premise": "A: Okay. Uh, it does.", "hypothesis": "it does", "label": 0},
        'Suppose A: Okay. Uh, it does. Can we infer that "it does"? Yes, No, or Maybe?\n',
        ("Yes", "No", "Maybe"),
        0,
    ),
    Golden(
        "cb",
        {"premise": "It never rains.", "hypothesis": "it rains", "label": 1},
        'Suppose It never rains. Can we infer that "it rains"? Yes, No, or Maybe?\n',
        ("Yes", "No", "Maybe"),
        1,
    ),
    Golden(
        "boolq",
        {"passage": "Skunks -- It is legal.", "question": "can you own one", "answer": True},
        "Skunks -- It is legal. Can you own one?\n",
        ("Yes", "No"),
        0,
    ),
    Golden(
        "boolq",
        {"passage": "Rain is wet.", "question": "Is UK rain dry?", "answer": False},
        "Rain is wet. Is UK rain dry?\n",
        ("Yes", "No"),
        1,
    ),
    Golden(
        "wsc",
        {
            "text": "Ann met Bo. She ran.",
            "span1_text": "Ann",
            "span2_text": "She",
            "span1_index": 0,
            "span2_index": 3,
            "label": 1,
        },
        'Ann met Bo. She ran.\nIn the previous sentence, does the pronoun "she" refer to Ann? Yes or No?\n',
        ("No", "Yes"),
        1,
    ),
    Golden(
        "wsc",
        {"text": "The cup fell.", "span1_text": "The Cup", "span2_text": "it", "label": 0},
        'The cup fell.\nIn the previous sentence, does the pronoun "it" refer to The Cup? Yes or No?\n',
        ("No", "Yes"),
        0,
    ),
    Golden(
        "wic",
        {"word": "run", "sentence1": "I run.", "sentence2": "A run of it.", "label": 0},
        'Does the word "run" have the same meaning in these two sentences? Yes, No?\nI run.\nA run of it.\n',
        ("No", "Yes"),
        0,
    ),
    Golden(
        "wic",
        {"word": "bed", "sentence1": "A bed of roses.", "sentence2": "The bed of a river.", "label": 1},
        'Does the word "bed" have the same meaning in these two sentences? Yes, No?\n'
        "A bed of roses.\nThe bed of a river.\n",
        ("No", "Yes"),
        1,
    ),
    Golden(
        "multirc",
        {
            "paragraph": "It rains.",
            "question": "Is it dry?",
            "answer": "No, wet",
            "label": 1,
            "idx": {"paragraph": 0, "question": 0, "answer": 0},
        },
        'It rains.\nQuestion: Is it dry?\nI found this answer "No, wet". Is that correct? Yes or No?\n',
        ("No", "Yes"),
        1,
    ),
    Golden(
        "multirc",
        {"paragraph": "Ann ran.", "question": "Who?", "answer": "Bo", "label": 0},
        'Ann ran.\nQuestion: Who?\nI found this answer "Bo". Is that correct? Yes or No?\n',
        ("No", "Yes"),
        0,
    ),
    Golden(
        "copa",
        {
            "premise": "My closet was messy.",
            "choice1": "I organized it.",
            "choice2": "It was old.",
            "question": "effect",
            "label": 0,
        },
        "My closet was messy so ",
        ("I organized it.", "it was old."),
        0,
        null_prompt=" so ",
    ),
    Golden(
        "copa",
        {
            "premise": "I was wet! ",
            "choice1": "I'm wet.",
            "choice2": "The Sun set...",
            "question": "cause",
            "label": 1,
        },
        "I was wet! because ",
        ("i'm wet.", "the Sun set..."),
        1,
        null_prompt=" because ",
    ),
    Golden(
        "copa",
        {"premise": "It fell...", "choice1": "A B", "choice2": "It did", "question": "cause", "label": 0},
        "It fell.. because ",
        ("a B", "it did"),
        0,
        null_prompt=" because ",
    ),
    Golden(
        "record",
        {
            "passage": "War in Rome.\n@highlight\nOslo helps\n@highlight\nPeace",
            "query": "The people of @placeholder won",
            "entities": ["Rome", "Oslo"],
            "entity_spans": {"text": ["Rome", "Oslo"], "start": [7, 24], "end": [11, 28]},
            "answers": ["Oslo"],
            "idx": {"passage": 0, "query": 0},
        },
        "War in Rome.\n- Oslo helps\n- Peace\n-",
        (" The people of Rome won", " The people of Oslo won"),
        1,
        references=(" The people of Oslo won",),
        null_prompt="-",
    ),
    Golden(
        "record",
        {
            "passage": "Ann met Bo.",
            "query": "@placeholder's friend met @placeholder",
            "entities": ["Ann", "Bo", "Ann Lee"],
            "answers": ["Ann Lee", "Ann"],
        },
        "Ann met Bo.\n-",
        (" Ann's friend met Ann", " Bo's friend met Bo", " Ann Lee's friend met Ann Lee"),
        2,
        references=(" Ann Lee's friend met Ann Lee", " Ann's friend met Ann"),
        null_prompt="-",
    ),
    Golden(
        "squad",
        {
            "id": "56",
            "title": "Rain",
            "context": "Rain is wet.",
            "question": " What is wet? ",
            "answers": {"text": ["Rain", "The rain"], "answer_start": [0, 0]},
        },
        "Title: Rain\nContext: Rain is wet.\nQuestion: What is wet?\nAnswer:",
        (" Rain\n",),
        0,
        references=("Rain", "The rain"),
        null_prompt=None,
    ),
    Golden(
        "squad",
        {
            "title": "Oslo",
            "context": "Oslo is old.",
            "question": "How old?",
            "answers": {"text": ["very old indeed"], "answer_start": [8]},
        },
        "Title: Oslo\nContext: Oslo is old.\nQuestion: How old?\nAnswer:",
        (" very old indeed\n",),
        0,
        references=("very old indeed",),
        null_prompt=None,
    ),
    Golden(
        "drop",
        {
            "section_id": "a",
            "query_id": "b",
            "passage": "Two ran.",
            "question": "How many? ",
            "answers_spans": {"spans": ["2", "two"], "types": ["number", "span"]},
        },
        "Passage: Two ran.\nQuestion: How many?\nAnswer:",
        (" 2\n",),
        0,
        references=("2", "two"),
        null_prompt=None,
    ),
    Golden(
        "drop",
        {
            "passage": "Ann and Bo ran.",
            "question": "Who ran?",
            "answers_spans": {"spans": ["Ann", "Bo"], "types": ["span", "span"]},
        },
        "Passage: Ann and Bo ran.\nQuestion: Who ran?\nAnswer:",
        (" Ann\n",),
        0,
        references=("Ann", "Bo"),
        null_prompt=None,
    ),
]
