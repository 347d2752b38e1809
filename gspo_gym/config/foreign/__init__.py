"""Other trainers' keys and what they mean here: tables, read by `reader.py`, and rules where these interact."""
