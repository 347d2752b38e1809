"""Wordle: find a hidden word from marks on the letters of each guess."""
