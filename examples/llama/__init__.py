"""A small Llama-like model over bytes: one description, one set of weights, two frameworks."""
