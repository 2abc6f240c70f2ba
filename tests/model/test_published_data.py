"""The score of a small OPT trained on English, on published records."""

import torch
from assets import shared_asset
from transformers import AutoModelForCausalLM

from lezo_ds.config import config_from_dict
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.dataset import Examples
from lezo_ds.data.encode import load_tokenizer
from lezo_ds.data.metrics import accuracy
from lezo_ds.data.objectives import candidate_scores


@torch.inference_mode()
def test_opt_mini_gets_47_of_64_right_without_training():
    path = str(shared_asset("models/opt-mini"))
    values = {
        "run_dir": "none",
        "model": {"path": path, "dtype": "fp32"},
        "data": {"path": str(shared_asset("data/sst2")), "num_test": 64, "max_length": 512},
    }
    test = Examples(config_from_dict(values, "the test")).split("test")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    batch = candidate_batch(list(test.encoded), load_tokenizer(path).pad_id)
    chosen = batch.selection
    logits = model(**batch.inputs).logits[chosen.rows, chosen.positions][:, chosen.vocabulary]
    predicted = candidate_scores(logits, batch).argmax(dim=1).tolist()
    assert accuracy(predicted, test.examples) == 47 / 64
