"""The demonstration's own data set and pre-trained model, both made on the spot."""
