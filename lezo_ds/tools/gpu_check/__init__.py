"""Everything that a GPU shows and a CPU does not, in one command: exact bits, speed, launches and memory."""
