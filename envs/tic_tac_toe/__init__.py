"""TicTacToe against a random, a perfect or a chosen opponent, or for both sides at once."""
