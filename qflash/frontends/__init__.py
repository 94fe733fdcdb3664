"""One module per framework; each offers attention, attention_varlen and describe (see api.py)."""
