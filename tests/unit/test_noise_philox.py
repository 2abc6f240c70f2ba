import pytest
import torch
from lezo_ds.noise.philox import philox4x32_10

# The known answers that come with Random123 (Salmon et al. 2011): counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    words = tuple(torch.tensor([int(word, 16)]) for word in counter.split())
    key0, key1 = (int(word, 16) for word in key.split())
    result = philox4x32_10(words, (key0, key1))
    assert " ".join(f"{int(word):08x}" for word in result) == expected
