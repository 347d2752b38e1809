"""Environments from rows of questions and answers, and the split of seeds into training and held-out ones."""
