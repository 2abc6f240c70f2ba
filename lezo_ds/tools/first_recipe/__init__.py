"""The first recipe of a user's own data: a guess from model, file and machine, with its reasons."""
