"""Layer-wise sparse zeroth-order fine-tuning (LeZO, MeZO) on DeepSpeed ZeRO-3."""
