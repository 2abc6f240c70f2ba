"""The demonstration without a network: made-up reviews, and a small OPT that is pre-trained on the spot."""
